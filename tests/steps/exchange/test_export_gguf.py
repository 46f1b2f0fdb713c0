"""The step `export_gguf`: a folder of the store becomes one file of it."""

from __future__ import annotations

import shutil

import pytest
from gguf import GGUFReader

from pipeline import InputError, StepContext, step
from pipeline.store import storage
from steps import GgufModel, HuggingFaceModel, export_gguf
from steps.exchange.gguf.file import write_gguf
from tests.steps.built import built
from tests.steps.exchange.hf_folders import NEEDS_ORACLE, folder

pytestmark = pytest.mark.slow  # imports transformers


@step(output=HuggingFaceModel, version=1)
def saved(run: StepContext, *, name: str) -> dict:
    """One of the models of `hf_folders`."""
    with run.shard("model") as directory:
        for path in folder(name).iterdir():
            with open(path, "rb") as source, storage.open_write(f"{directory}/{path.name}") as to:
                shutil.copyfileobj(source, to)
    return {}


def exported(store: str, **settings) -> tuple[GgufModel, list[dict]]:
    """The artifact of the step, and the events of the run."""
    events: list[dict] = []
    return built(
        store, export_gguf(saved(name="qwen3_yarn"), **settings), GgufModel, events=events
    ), events


@NEEDS_ORACLE
def test_the_file_is_that_of_the_function(tmp_path):
    """In a store of which no path can be given."""
    model, events = exported("memory://export-gguf", dtype="q8_0", name="small")
    assert model.file.endswith("/small-q8_0.gguf")
    wanted = tmp_path / "wanted.gguf"
    write_gguf(str(folder("qwen3_yarn")), str(wanted), "q8_0", "small")
    assert storage.read_bytes(model.file) == wanted.read_bytes()
    assert model.result["parameters"] == sum(t.n_elements for t in GGUFReader(wanted).tensors)
    assert model.result["headline"] == ["small-q8_0.gguf: qwen3, tokenizer qwen2, 0.3 MB"]
    # Its tokenizer is Qwen2's, which composes characters.
    assert any("llama.cpp does not" in str(event.get("message")) for event in events)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dtype": "q4_k"}, "export_gguf.dtype: expected one of f16, bf16, q8_0, f32"),
        ({"name": "../x"}, "expected a plain relative path"),
    ],
)
def test_refused_while_the_graph_is_built(settings, line):
    """Before a model is trained."""
    with pytest.raises(InputError, match=line):
        export_gguf(saved(name="qwen3"), **settings)
