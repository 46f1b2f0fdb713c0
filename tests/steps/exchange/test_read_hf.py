"""Folders that cannot be imported, each refused in one line before anything is written."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file

from pipeline.errors import InputError
from steps.exchange.gguf.file import write_gguf
from steps.exchange.hf.hf_files import SINGLE
from steps.exchange.hf.read_hf import list_model, open_hf, opened, write_checkpoint
from tests.faults.fake_hub import COMMIT, FakeHub
from tests.steps.exchange.hf_folders import INDEX, ROWS, SMALL, write_small
from tests.steps.exchange.hf_folders import SMALL_FILES as FILES
from training.checkpoint.restore import StoredModel

IDS = 1000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of two safetensors files."""
    folder = tmp_path_factory.mktemp("whole")
    write_small(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "model")


def rewrite(folder, change, file=FILES[0]):
    """A safetensors file with other tensors, and the index that has them."""
    tensors = change(load_file(folder / file))
    save_file(tensors, folder / file, metadata={"format": "pt"})
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = {k: f for k, f in index["weight_map"].items() if f != file}
    index["weight_map"] |= dict.fromkeys(tensors, file)
    path.write_text(json.dumps(index))


def reindex(folder, change):
    """The index with other files of tensors."""
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": change(index["weight_map"])}))


def reconfigure(folder, **keys):
    """config.json with other keys."""
    (folder / "config.json").write_text(json.dumps({**SMALL, **keys}))


TABLE = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda f: (f / FILES[1]).unlink(), r"00002-of-00002.safetensors: expected a safetensors"),
        (lambda f: (f / FILES[1]).write_bytes(b"x" * 40), "expected a safetensors file"),
        (
            lambda f: rewrite(f, lambda t: {k: v.astype(np.int8) for k, v in t.items()}),
            "has dtype I8; only BF16, F16, F32 are read",
        ),
        (
            lambda f: rewrite(f, lambda t: {**t, "model.layers.0.extra": np.ones(3, np.float32)}),
            "tensor model.layers.0.extra has no place",
        ),
        (
            lambda f: rewrite(f, lambda t: dict(list(t.items())[1:])),
            "is missing in the model",
        ),
        (
            lambda f: rewrite(f, lambda t: {k: v[..., :-1].copy() for k, v in t.items()}),
            "has shape .*; by config.json it is",
        ),
        (
            lambda f: reindex(f, lambda w: w | {TABLE: "sub/" + w[TABLE]}),
            "embed_tokens.weight: expected the name of a file in the folder, found 'sub/",
        ),
        (
            lambda f: reindex(f, lambda w: w | {TABLE: FILES[1]}),
            "weight_map and the tensors of model-0000.* differ in 'model.embed_tokens.weight'",
        ),
        (
            lambda f: reindex(f, lambda w: dict(list(w.items())[1:])),
            "weight_map and the tensors of model-0000.* differ in ",
        ),
        (
            lambda f: reconfigure(f, rope_parameters={"rope_type": "longrope"}),
            "rope_type 'longrope' is unknown here",
        ),
        (
            lambda f: reconfigure(f, vocab_size=900),
            r"has shape \(1024, 48\); by config.json it is \(900, 48\)",
        ),
        (
            lambda f: (
                reconfigure(f, vocab_size=900),
                rewrite(f, lambda t: t | {TABLE: t[TABLE][:900].copy()}),
            ),
            "has 1000 ids and the model's vocab_size is 900",
        ),
        (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: No such file"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "expected the JSON of a tokenizer"),
    ],
    ids=lambda value: None if callable(value) else str(value)[:24],
)
def test_damaged_folders_are_refused(folder, damage, line):
    """By file, tensor or key, in one line."""
    damage(folder)
    with pytest.raises(InputError, match=line) as caught:
        open_hf(str(folder))
    assert "\n" not in str(caught.value)


def written(folder) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file of a folder, by their name in it."""
    path = folder / "out.gguf"
    write_gguf(str(folder), str(path), "f32", "x")
    return {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}


def test_the_single_file_comes_before_an_index(folder):
    """As `transformers` reads it: the index is of an earlier model, here without its files."""
    tensors = load_file(folder / FILES[0]) | load_file(folder / FILES[1])
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / FILES[1]).unlink()
    want = tensors["model.norm.weight"]
    read = open_hf(str(folder))[0].content.read("model.norm.weight")
    np.testing.assert_array_equal(read, want)
    np.testing.assert_array_equal(written(folder)["output_norm.weight"], want)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("own", [True, False])
def test_a_head_beside_a_tied_embedding(folder, tmp_path, own, kind):
    """Is the model's if it differs in a value, whatever config.json says and whichever dtype."""

    def with_head(tensors):
        head = tensors[TABLE].astype(kind)
        head[-1, -1] += own
        return {**tensors, "lm_head.weight": head}

    rewrite(folder, with_head)
    model, *_ = open_hf(str(folder))
    assert model.config.tied == (not own)
    write_checkpoint(model, str(tmp_path / "checkpoint"))
    stored = StoredModel(str(tmp_path / "checkpoint"), model.config)
    table = stored.read("embedding")
    head = stored.read("head") if own else table
    assert ((head != table).sum(), head[-1, -1] != table[-1, -1]) == (own, own)
    assert ("output.weight" in written(folder)) == own


def test_values_and_ids_without_a_text(whole, tmp_path):
    """Float16 is widened exactly; rows that the tokenizer has no id for are padding."""
    model, *_ = open_hf(str(whole))
    assert (model.config.vocab_size, model.config.padded_vocab_size) == (IDS, ROWS)
    write_checkpoint(model, str(tmp_path / "checkpoint"))
    stored = StoredModel(str(tmp_path / "checkpoint"), model.config)
    tensors = load_file(whole / FILES[0]) | load_file(whole / FILES[1])
    np.testing.assert_array_equal(stored.read("embedding"), tensors["model.embed_tokens.weight"])
    name = "model.layers.2.self_attn.q_proj.weight"
    query = stored.read("blocks.stacked.attention.query.matrix", (2, 3))
    np.testing.assert_array_equal(query.reshape(48, 48), tensors[name].astype(np.float32).T)


def test_values_that_are_not_finite(folder, tmp_path):
    """Are refused by the name of the array."""
    rewrite(folder, lambda t: {k: np.full_like(v, np.inf) for k, v in t.items()})
    with pytest.raises(InputError, match=r"model\.\S+: expected finite values"):
        write_checkpoint(open_hf(str(folder))[0], str(tmp_path / "checkpoint"))


def test_the_hub_has_the_same_model(whole):
    """Its commit pins it, and its files are those of the folder."""
    files = {f"small/{path.name}": path.read_bytes() for path in whole.iterdir()}
    source = f"hf://datasets/owner/name@{COMMIT}/small"
    with FakeHub(files):
        assert list_model(source, 10.0).pinned == f"commit {COMMIT}"
        with opened(source) as copy:
            assert open_hf(copy)[0].config == open_hf(str(whole))[0].config


def test_a_folder_is_known_by_its_files(folder, whole):
    """Not by its place; another value in a file is another model."""
    assert list_model(str(folder), 1.0).digest == list_model(str(whole), 1.0).digest
    rewrite(folder, lambda t: {k: v * 2 for k, v in t.items()})
    assert list_model(str(folder), 1.0).digest != list_model(str(whole), 1.0).digest
