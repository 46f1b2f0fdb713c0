"""`load`: a trained model in three lines of Python."""

from __future__ import annotations

import dataclasses
import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import models.named as hax
import steps
import steps.cli.generate as verb
from pipeline.errors import InputError
from pipeline.store.manifest import load as manifest_of
from steps.checkpoints.find import find, open_model

pytestmark = pytest.mark.slow  # whichever test comes first trains the model


@pytest.fixture(scope="module")
def model(trained):
    """The model that was trained."""
    return steps.load(trained)


def test_logits_are_the_models(model, trained):
    """Of one row and of several, as the network gives them without padding."""
    ids = model.tokenizer.encode_batch(["Return the name of a module, and so on. " * 2])[0]
    found = find(trained)
    network = open_model(found.path, found.model, found.compute_dtype)
    assert len(ids) > 16  # is padded to 32
    rows = hax.named(jnp.asarray(ids[None, :], jnp.int32), ("batch", "position"))
    wanted = np.asarray(network.logits(rows).array)
    logits = model(ids)
    assert logits.dtype == np.float32
    assert logits.shape == (len(ids), 512)
    np.testing.assert_allclose(logits, wanted[0], atol=2e-5)
    both = model([ids.tolist(), ids[::-1].tolist()])
    assert both.shape == (2, len(ids), 512)
    np.testing.assert_allclose(both[0], logits, atol=2e-5)
    assert np.abs(both[1] - logits).max() > 0.01


def test_the_three_lines_of_the_docs(trained, model, capsys):
    """As they stand there, with a directory that exists."""
    page = (Path(__file__).parents[3] / "docs" / "use_in_python.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(block.splitlines()) == 5  # the import, an empty one, and three
    found: dict[str, Any] = {}
    exec(block.replace("runs/train-0123456789", trained), found)
    text = "The three laws of"
    assert capsys.readouterr().out == model.generate(text) + "\n"
    np.testing.assert_array_equal(found["logits"], model(model.encode(text)))


def test_text_is_that_of_the_verb(model, trained):
    """With its defaults, and with others."""
    for flags, settings in (
        ((), {}),
        (
            ("--temperature", "1.5", "--top-k", "0", "--top-p", "0.9", "--seed", "3"),
            {"temperature": 1.5, "top_k": None, "top_p": 0.9, "seed": 3},
        ),
    ):
        printed = io.StringIO()
        with redirect_stdout(printed):
            verb.run([trained, "--prompt", "Return the", "--new-tokens", "20", *flags])
        written = model.generate("Return the", new_tokens=20, **settings)
        assert f"Return the{written}\n" == printed.getvalue()


def test_greedy_text_is_the_likeliest_token_each_time(model):
    """By the logits alone."""
    ids = model.encode("This module")
    assert ids == [model.tokenizer.eos_id, *model.tokenizer.encode_batch(["This module"])[0]]
    start = len(ids)
    for _ in range(4):
        ids.append(int(model(ids)[-1].argmax()))
    text = model.generate("This module", new_tokens=4, temperature=0)
    assert model.tokenizer.eos_id not in ids[1:]
    assert text == model.tokenizer.decode(ids[start:])


def test_an_artifact_and_a_tokenizer_of_ones_own(model, trained):
    """What a step that trains returned; a tokenizer.json in another place."""
    artifact = steps.Checkpoint(trained, manifest_of(trained))
    tokenizer = find(trained).tokenizer().file
    for given in (tokenizer, tokenizer.rpartition("/")[0]):
        again = steps.load(artifact, tokenizer=given)
        assert again.trained == model.trained
        np.testing.assert_array_equal(again([1, 2]), model([1, 2]))


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ([], "expected at least one whole number"),
        ([0.5], "found float64"),
        ([[[1]]], r"of shape \(1, 1, 1\)"),
        ([512], r"expected ids in \[0, 512\), found 512 to 512"),
        ([-1], "found -1 to -1"),
    ],
)
def test_what_are_no_tokens_is_refused(model, tokens, line):
    """In one line."""
    with pytest.raises(InputError, match=line):
        model(tokens)


def test_rows_longer_than_learned_positions_are_refused(model):
    """The model has no number for them."""
    import jax

    from models.generate.generate import next_token_logits
    from models.transformer import Transformer

    learned = dataclasses.replace(model.trained.model, positions="learned", context=24)
    network = Transformer.init(learned, key=jax.random.key(0))
    with pytest.raises(InputError, match="at most 24 positions"):
        next_token_logits(network, np.ones((1, 25), np.int32))
