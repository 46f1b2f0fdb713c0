"""Samples while training: the same text on every mesh, from one program."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from data.tokenizer.special_tokens import SMALLEST_VOCAB
from data.tokenizer.text_tokenizer import TextTokenizer, train
from models.generate.generate import generate
from models.generate.sampling_config import Sampling
from models.transformer import Transformer
from pipeline.errors import InputError
from tests.training import tiny
from training.config import Parallelism
from training.config.job import Prompts
from training.evaluate import generate_samples
from training.evaluate.generate_samples import SampleGenerator
from training.sharding.layout import make_layout

MODEL = dataclasses.replace(tiny.MODEL, vocab_size=SMALLEST_VOCAB)
TEXTS = ("", *(f"{number} times" for number in range(15)))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train([["a b c"]], SMALLEST_VOCAB))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "devices", "new_tokens"),
    [
        (Parallelism(sharding="fsdp", group=2, tensor=2), 4, 24),
        (Parallelism(sharding="replicated", sequence=2), 4, 24),
        (Parallelism(), 1, 1),
    ],
    ids=["fsdp_and_tensor", "sequence", "one_token"],
)
def test_every_mesh_writes_what_generate_writes(url, monkeypatch, parallel, devices, new_tokens):
    """Drawn, from an empty prompt too, while the parameters change; compiled once."""
    if new_tokens == 1:  # with the back end of long prompts
        monkeypatch.setattr(generate_samples, "_REFERENCE_MAX_PROMPT", 1)
    layout, tokenizer = make_layout(jax.devices()[:devices], parallel), TextTokenizer.load(url)
    sampling, eos = Sampling(temperature=9.0, seed=1), tokenizer.eos_id
    prompts = Prompts(tokenizer=url, prompts=TEXTS, new_tokens=new_tokens, sampling=sampling)
    generator, ended = SampleGenerator(prompts, MODEL, layout, "float32"), []
    for seed in (0, 1):
        # Not as they start, where every prediction is alike: ten times as large.
        model = jax.jit(lambda key: Transformer.init(MODEL, key=key))(jax.random.key(seed))
        model = jax.tree.map(lambda leaf: leaf * 10, model)
        found = generator(jax.device_put(model, layout.shardings(model)))
        encoded = [tokenizer.prompt_ids(text) for text in TEXTS]
        ids = generate(model, encoded, new_tokens=new_tokens, sampling=sampling, eos_id=eos)
        texts = [tokenizer.decode([i for i in row if i != eos]) for row in ids]
        assert [tuple(sample.values()) for sample in found] == list(zip(TEXTS, texts, strict=True))
        ended += [row[-1] == eos for row in ids]
    if new_tokens > 1:
        assert any(ended)
        assert not all(ended)
    assert generator._sample._cache_size() == 1


def test_what_cannot_be_continued_is_refused_before_training(url):
    learned = dataclasses.replace(MODEL, positions="learned", context=16)
    prompts = Prompts(tokenizer=url, prompts=("a" * 10,), new_tokens=7)
    with pytest.raises(InputError, match="16 learned positions"):
        SampleGenerator(prompts, learned, make_layout(jax.devices()[:1]), "float32")
