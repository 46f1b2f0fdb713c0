"""`ponente generate` on a model trained for a few steps: what it prints, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import sys
import tomllib
from pathlib import Path

import pytest

import steps.cli.generate as verb
from models.generate.generate import generate
from models.generate.sampling_config import Sampling
from pipeline.store import storage
from steps.checkpoints.find import find, open_model

pytestmark = pytest.mark.slow  # whichever test comes first trains the model

ROOT = Path(__file__).parents[3]
PROMPTS = ("Return the", "This module", "")
TOKENS = 20
HOT = ("--temperature", "1.5", "--top-k", "0", "--top-p", "0.9", "--seed", "3")


def expected(directory: str, sampling: Sampling) -> list[str]:
    """Prompts and completions, by the function that the verb is built on."""
    found = find(directory)
    tokenizer = found.tokenizer().load()
    model = open_model(found.path, found.model, found.compute_dtype)
    ids = [tokenizer.prompt_ids(prompt) for prompt in PROMPTS]
    eos = tokenizer.eos_id
    written = generate(model, ids, new_tokens=TOKENS, sampling=sampling, eos_id=eos)
    texts = [tokenizer.decode([i for i in row if i != eos]) for row in written]
    return [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]


def said(capsys, *arguments: str) -> tuple[str, str]:
    assert verb.run([*arguments]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def flags(*more: str) -> list[str]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return [*prompts, "--new-tokens", str(TOKENS), *more]


def test_it_prints_what_generate_returns(trained, capsys):
    """Three prompts in order, one of them empty; the checkpoint is named beside."""
    out, err = said(capsys, trained, *flags(*HOT))
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=3)
    assert out == "\n\n".join(expected(trained, sampling)) + "\n"
    assert "checkpoint of step 8, training finished" in err
    assert "warning" not in err
    assert said(capsys, trained, *flags("--temperature", "0"))[0] != out


def test_lines_of_the_standard_input(trained, capsys, monkeypatch):
    """Each is a prompt of its own, the first row of its own batch."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffReturn the\r\nThis module"))
    out, _ = said(capsys, trained, "--new-tokens", str(TOKENS), *HOT)
    alone = [
        said(capsys, trained, "--prompt", p, "--new-tokens", str(TOKENS), *HOT)[0] for p in PROMPTS
    ]
    assert out == alone[0] + alone[1]


def test_more_than_it_was_trained_on_is_warned_of(trained, capsys):
    """Rows had 64 tokens; rotary positions go on."""
    out, err = said(
        capsys, trained, "--prompt", "Return", "--new-tokens", "90", "--temperature", "0"
    )
    assert "warning: up to 9" in err
    assert "64" in err
    assert out.startswith("Return")


def test_without_a_number_of_tokens_it_stops_where_training_did(trained, capsys):
    """The default of 128 would pass the 64 tokens of a row, which is no reason for a warning."""
    out, err = said(capsys, trained, "--prompt", "Return", "--temperature", "0")
    assert "checkpoint of step 8" in err
    assert "warning" not in err
    assert out.startswith("Return")


@pytest.fixture
def refused(typed):
    """The one line that the command ends with."""

    def line(*arguments: str) -> str:
        status, out, err = typed("generate", *arguments)
        assert (status, out) == (1, "")
        return err.splitlines()[-1]

    return line


def test_refusals(trained, refused, tmp_path):
    """A line each that says what is wrong and what to do."""
    missing, store = str(tmp_path / "nowhere"), str(Path(trained).parent)
    (other, *_) = (n for n in storage.list_names(store) if n.startswith("block_shuffle-"))
    wrong = refused(storage.join(store, other), "--prompt", "a")
    assert "found one of block_shuffle" in wrong
    assert "surrogate" in refused(trained, "--prompt", "caf\udce9")
    assert missing in refused(trained, "--prompt", "a", "--tokenizer", missing)
    empty = str(tmp_path)
    found = refused(trained, "--prompt", "a", "--tokenizer", empty)
    assert f"{empty}: found a directory without a tokenizer.json" in found


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--new-tokens", "0", "at least 1"),
        ("--temperature", "-1", "0 or above"),
        ("--temperature", "nan", "0 or above"),
        ("--top-k", "-1", "0 or above; 0 for all"),
        ("--top-p", "0", "above 0 and at most 1; 1 for all"),
        ("--seed", "-1", "0 to 2^32 - 1"),
    ],
)
def test_what_a_flag_cannot_be_is_said_of_the_flag(refused, flag, value, wanted):
    """In its own words, before the checkpoint is looked for."""
    line = refused("nowhere", "--prompt", "a", flag, value)
    number = int(value) if flag in ("--new-tokens", "--top-k", "--seed") else float(value)
    assert line == f"error: {flag}: found {number}, expected {wanted}"


def test_a_standard_input_that_is_no_text(trained, refused, monkeypatch):
    """One line that names the byte."""
    latin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", latin)
    line = refused(trained)
    assert line.startswith("error: standard input: expected utf-8 text, found the byte 0xe9")


def test_an_interrupt_just_ends_it(trained, typed, monkeypatch):
    """With the status of one, and no word of steps."""

    class Interrupted(io.StringIO):
        def readline(self, *_: int) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    status, out, err = typed("generate", trained)
    assert (status, out) == (130, "")
    (line,) = err.splitlines()
    assert line.startswith("checkpoint of step")


def test_a_prompt_too_long_for_learned_positions(trained, refused, monkeypatch):
    """Refused before the model is read."""
    found = find(trained)
    learned = dataclasses.replace(found.model, positions="learned", context=24)
    short = dataclasses.replace(found, model=learned)
    monkeypatch.setattr(verb, "find", lambda url: short)
    monkeypatch.setattr(verb, "open_model", None)
    line = refused(trained, "--prompt", "Return " * 30, "--new-tokens", "3")
    assert "24 learned positions" in line
    assert "shorten the prompt" in line


def test_a_tokenizer_of_another_size(trained, refused, monkeypatch):
    found = find(trained)
    other = dataclasses.replace(found, model=dataclasses.replace(found.model, vocab_size=999))
    monkeypatch.setattr(verb, "find", lambda url: other)
    line = refused(trained, "--prompt", "a")
    assert "512" in line
    assert "999" in line


def test_the_installed_command_is_this_one(typed):
    """The script's entry point; without a verb it lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"ponente": "steps.cli:command"}
    status, _, err = typed()
    assert (status, "  generate " in err) == (2, True)
