"""Samples while training: the same text on every mesh, from one program."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from data.tokenizer.special_tokens import SMALLEST_VOCAB
from data.tokenizer.text_tokenizer import TextTokenizer, train
from models.generate.generate import generate
from models.generate.sampling_config import Sampling
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from pipeline.errors import InputError
from tests.training import tiny
from training.config import Parallelism
from training.config.job import Prompts
from training.evaluate.generate_samples import SampleGenerator, Sampler
from training.sharding.layout import make_layout

PROMPTS = ([3, 1, 4], [7], [5] * 9)
HOT = Sampling(temperature=3.0, top_k=40, top_p=0.9, seed=5)


def parameters(seed: int, config: TransformerConfig = tiny.MODEL) -> Transformer:
    """Not as they start, where every prediction is alike: ten times as large."""
    model = jax.jit(lambda key: Transformer.init(config, key=key))(jax.random.key(seed))
    return jax.tree.map(lambda leaf: leaf * 10, model)


def placed(model: Transformer, layout) -> Transformer:
    return jax.device_put(model, layout.shardings(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        Parallelism(sharding="fsdp", group=2, tensor=2),
        Parallelism(sharding="replicated", sequence=2),
    ],
    ids=["fsdp_and_tensor", "sequence"],
)
def test_every_mesh_writes_what_one_device_writes(parallel):
    """Drawn, some rows ended before others, while the parameters change; compiled once."""
    layout = make_layout(jax.devices()[:4], parallel)
    options = {"new_tokens": 7, "sampling": HOT, "eos_id": 11}
    sampler = Sampler(tiny.MODEL, layout, PROMPTS, compute_dtype="float32", **options)
    for seed in (0, 1):
        model = parameters(seed)
        assert sampler(placed(model, layout)) == generate(model, PROMPTS, **options)
    assert sampler._sample._cache_size() == 1


@pytest.mark.slow
def test_one_new_token():
    """The one that the prompts' own pass gives."""
    layout = make_layout(jax.devices()[:1])
    model = parameters(0)
    sampler = Sampler(tiny.MODEL, layout, PROMPTS, new_tokens=1, compute_dtype="float32")
    assert sampler(placed(model, layout)) == generate(model, PROMPTS, new_tokens=1)


@pytest.mark.slow
def test_texts_begin_and_end_as_those_of_generate(tmp_path):
    """An empty prompt begins a document, and the end of one is not spelled out."""
    url = tmp_path / "tokenizer.json"
    url.write_bytes(train([["a b c"]], SMALLEST_VOCAB))
    tokenizer = TextTokenizer.load(str(url))
    config = dataclasses.replace(tiny.MODEL, vocab_size=SMALLEST_VOCAB)
    layout, model = make_layout(jax.devices()[:1]), parameters(0, config)
    texts = ("", *(f"{number} times" for number in range(15)))
    sampling = Sampling(temperature=9.0, seed=1)
    prompts = Prompts(tokenizer=str(url), prompts=texts, new_tokens=24, sampling=sampling)
    ids = generate(
        model,
        [tokenizer.prompt_ids(text) for text in texts],
        new_tokens=24,
        sampling=sampling,
        eos_id=tokenizer.eos_id,
    )
    ended = [row[-1] == tokenizer.eos_id for row in ids]
    assert any(ended)
    assert not all(ended)
    found = SampleGenerator(prompts, config, layout, "float32")(placed(model, layout))
    assert [sample["prompt"] for sample in found] == list(texts)
    for sample, row, end in zip(found, ids, ended, strict=True):
        assert sample["completion"] == tokenizer.decode(row[:-1] if end else row)


def test_what_cannot_be_continued_is_refused_before_training():
    """Not at the first samples."""
    learned = dataclasses.replace(tiny.MODEL, positions="learned", context=16)
    layout = make_layout(jax.devices()[:1])
    with pytest.raises(InputError, match="16 learned positions"):
        Sampler(learned, layout, [[1] * 10], new_tokens=7, compute_dtype="float32")
