"""`ponente export`: what it writes, what it prints, what it refuses."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

from steps import load
from steps.exchange.gguf.file import write_gguf
from tests.steps.exchange.hf_folders import NEEDS_ORACLE, SMALL, folder, model, write_small

pytestmark = [pytest.mark.slow, NEEDS_ORACLE]


@pytest.fixture
def export(typed, monkeypatch, tmp_path):
    """Runs the verb in an empty directory: (exit status, output, errors)."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(typed, "export")


def test_a_hugging_face_folder_becomes_a_gguf_file(export, tmp_path):
    """In the current directory and named after the folder, or where one says."""
    source = folder("llama")
    status, out, _ = export(source, "--to", "gguf")
    made = tmp_path / f"{source.name}-f16.gguf"
    wanted = tmp_path / "wanted.gguf"
    write_gguf(str(source), str(wanted), "f16", source.name)
    assert made.read_bytes() == wanted.read_bytes()
    assert status == 0
    assert f"llama, {model('llama').num_parameters():,} parameters, tokenizer llama-bpe" in out
    given = tmp_path / "new" / "mine.gguf"
    assert export(source, "--to", "gguf", "--dtype", "q8_0", "--out", given)[0] == 0
    assert 0 < given.stat().st_size < made.stat().st_size
    assert {path.name for path in tmp_path.iterdir()} == {made.name, "wanted.gguf", "new"}


def test_refusals(export, tmp_path):
    """A line each, and no file left behind."""
    status, _, line = export(tmp_path, "--to", "gguf")
    assert status == 1
    assert "expected the directory of a train step" in line
    status, _, line = export(folder("llama"), "--to", "hf")
    assert "is a Hugging Face folder already" in line
    status, _, line = export(folder("llama"), "--to", "gguf", "--dtype", "bfloat16")
    assert "expected one of f16, bf16, q8_0, f32 with --to gguf, found 'bfloat16'" in line
    (tmp_path / "there.gguf").write_text("")
    status, _, line = export(folder("llama"), "--to", "gguf", "--out", "there.gguf")
    assert status == 1
    assert "there.gguf: exists already" in line
    (tmp_path / "config.json").write_text('{"architectures": ["NanoChatForCausalLM"]}')
    status, _, line = export(tmp_path, "--to", "gguf", "--out", "new.gguf")
    assert status == 1
    assert "config.json: hidden_size: expected a positive integer, found None" in line
    assert {path.name for path in tmp_path.iterdir()} == {"there.gguf", "config.json"}


def test_a_key_that_the_caller_knows(export, tmp_path):
    """Is named, and then passed over."""
    source = tmp_path / "small"
    source.mkdir()
    write_small(source)
    (source / "config.json").write_text(json.dumps({**SMALL, "mine": 7}))
    assert "unknown key 'mine' = 7" in export(source, "--to", "gguf", "--out", "one")[2]
    assert export(source, "--to", "gguf", "--out", "one", "--ignore-keys", "mine")[0] == 0


def test_a_train_step_becomes_either(export, trained, tmp_path):
    """`transformers` gives the logits of `load`; the GGUF file is that of the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = trained.rpartition("/")[2]
    status, out, _ = export(trained, "--to", "hf", "--dtype", "float32", "--out", name)
    assert status == 0
    assert "Qwen3ForCausalLM, last parameters" in out
    ours, theirs = load(trained), AutoModelForCausalLM.from_pretrained(tmp_path / name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
    ids = [tokenizer.bos_token_id, *tokenizer("Return the name")["input_ids"]]
    assert ids == ours.encode("Return the name")
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(ours(ids), logits, atol=1e-4)
    assert export(trained, "--to", "gguf", "--out", "one.gguf")[0] == 0
    assert export(name, "--to", "gguf", "--out", "two.gguf")[0] == 0
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    # In a process of its own, where nothing else has taught NumPy what bfloat16 is.
    assert export(trained, "--to", "hf", "--out", "half")[0] == 0
    verb = "from steps.cli import command; command()"
    done = subprocess.run(
        [sys.executable, "-c", verb, "export", "half", "--to", "gguf"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "half-f16.gguf").is_file()
