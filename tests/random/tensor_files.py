"""Damaged files of tensors are read as `transformers` reads them, or refused."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from steps.exchange.hf.hf_files import INDEX, SINGLE
from steps.exchange.hf.read_hf import open_hf
from tests.data.tokenizer.split_tokenizers import tokenizer_json
from tests.faults.registry import Fault, trials
from tests.random.config_changes import sound
from tests.random.folders import build_theirs, gguf, load_theirs, oracle, refusal, save


def damaged(folder: Path, draw: random.Random, spare: Path) -> str:
    """Change the files of a folder in one or two ways; returns what was done."""
    done = []
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(list(_DAMAGES))
        with contextlib.suppress(ValueError, LookupError, AttributeError, SafetensorError):
            _DAMAGES[name](folder, draw, spare)  # may not know what the first has made
            done.append(name)
    return ", ".join(done)


def _header(change: Callable[[dict[str, Any], random.Random], None]) -> Any:
    def changed(folder: Path, draw: random.Random, _: Path) -> None:
        path = draw.choice(sorted(folder.glob("*.safetensors")))
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header, draw)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return changed


def _some(header: dict[str, Any], draw: random.Random, count: int = 1) -> list[str]:
    names = sorted(header.keys() - {"__metadata__"})
    return draw.sample(names, min(count, len(names)))


def _swap(field: str | None) -> Any:
    def change(header: dict[str, Any], draw: random.Random) -> None:
        one, other = (_some(header, draw, 2) * 2)[:2]
        if field is None:
            header[one], header[other] = header[other], header[one]
        else:
            header[one][field], header[other][field] = header[other][field], header[one][field]

    return change


def _set(field: str, *values: Any) -> Any:
    def change(header: dict[str, Any], draw: random.Random) -> None:
        header[_some(header, draw)[0]][field] = draw.choice(values)

    return change


def _rename(header: dict[str, Any], draw: random.Random) -> None:
    name = _some(header, draw)[0]
    renamed = draw.choice((name + "x", "lm_head.weight", "model." + name, name.upper()))
    header[renamed] = header.pop(name)


def _index(change: Callable[[dict[str, str], random.Random], Any]) -> Any:
    def changed(folder: Path, draw: random.Random, _: Path) -> None:
        path = folder / INDEX
        if path.exists():
            index = json.loads(path.read_text())
            index["weight_map"] = change(dict(index["weight_map"]), draw)
            path.write_text(json.dumps(index))

    return changed


def _without(weights: dict[str, str], draw: random.Random) -> dict[str, str]:
    weights.pop(draw.choice(sorted(weights)))
    return weights


def _moved(weights: dict[str, str], draw: random.Random) -> dict[str, str]:
    name = draw.choice(sorted(weights))
    files = sorted(set(weights.values()))
    weights[name] = draw.choice((*files, "sub/" + files[0], "./" + files[0], "none.safetensors"))
    return weights


def _copy(*names: str) -> Any:
    """Other files beside the folder's: of a model of other numbers."""

    def changed(folder: Path, draw: random.Random, spare: Path) -> None:
        for name in names:
            for path in sorted(spare.glob(name)):
                shutil.copy(path, folder / path.name)

    return changed


def _flipped(folder: Path, draw: random.Random, _: Path) -> None:
    path = draw.choice(sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX)]))
    data = bytearray(path.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    data[draw.randrange(min(size, len(data)))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _head(folder: Path, draw: random.Random, _: Path) -> None:
    """A head beside a tied flag: of its own, or the embedding once more."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if (table := tensors.get("model.embed_tokens.weight")) is not None:
            kind = draw.choice((np.float16, np.float32))
            head = table * draw.choice((1, 2)) + draw.choice((0, 1e-3))
            save_file({**tensors, "lm_head.weight": head.astype(kind)}, path, {"format": "pt"})


_DAMAGES: dict[str, Any] = {
    "two tensors swapped": _header(_swap(None)),
    "two shapes swapped": _header(_swap("shape")),
    "two ranges swapped": _header(_swap("data_offsets")),
    "another dtype": _header(_set("dtype", "F16", "BF16", "F32", "I16", "U32", "F8_E4M3", "x", 7)),
    "another shape": _header(_set("shape", [], [0], [4, 4], [2**40, 2**40], [-1], "x", [1.5])),
    "another range": _header(_set("data_offsets", [0, 4], [4, 0], [0, 2**60], [-4, 4], [], 7)),
    "another name": _header(_rename),
    "an index without a tensor": _index(_without),
    "an index with a tensor elsewhere": _index(_moved),
    "an index with more": _index(lambda w, draw: w | {draw.choice(string.ascii_letters): "a"}),
    "an index beside the file": _copy(INDEX, "model-*"),
    "a file beside the index": _copy(SINGLE),
    "a flipped bit": _flipped,
    "a head": _head,
}


def random_tensors(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Headers and indices at random: the numbers that `transformers` reads, or refused."""
    oracle()
    figures = dict.fromkeys(("equal", "refused", "only_here"), 0)
    tokenizer = tokenizer_json("gpt2")
    config = sound("Qwen3", random.Random(0)) | {"tie_word_embeddings": False, "layer_types": None}
    config["use_sliding_window"] = False
    one, many = workspace / "one", workspace / "many"
    for scale, whole, size in ((1, one, "1GB"), (2, many, "20KB")):
        built = build_theirs(config)
        for parameter in built.parameters():
            parameter.data.mul_(scale)
        save(whole, built, config, tokenizer, size)

    def trial(number: int) -> None:
        draw = random.Random(number)
        first, other = draw.choice(((one, many), (many, one)))
        folder = shutil.copytree(first, workspace / "model")
        try:
            done = damaged(folder, draw, other)
            ours, line = refusal(lambda: open_hf(str(folder))[0])
            if line is not None:
                figures["refused"] += 1
                assert "safetensors" in line or "tensor" in line or "weight" in line, line
                assert refusal(lambda: gguf(folder, workspace))[1] is not None, done
                return
            theirs = load_theirs(folder)
            written, gguf_line = refusal(lambda: gguf(folder, workspace))
            if theirs is None:
                figures["only_here"] += 1
                return
            figures["equal"] += 1
            state = {name: value.numpy() for name, value in theirs.state_dict().items()}
            if ours.config.tied:
                state.pop("lm_head.weight", None)
            assert state.keys() == {t.name for t in ours.tensors}, done
            for tensor in ours.tensors:
                got = ours.content.read(tensor.name).astype(np.float32)
                assert np.array_equal(got, state[tensor.name], equal_nan=True), (done, tensor.name)
            finite = all(np.isfinite(value).all() for value in state.values())
            assert (written is not None) == finite, (done, gguf_line)
            if written is not None:
                stored = {t.name: t.data for t in written.tensors}
                table = state["model.embed_tokens.weight"]
                assert np.array_equal(stored["token_embd.weight"], table), done
                head = stored.get("output.weight", stored["token_embd.weight"])
                assert np.array_equal(head, state.get("lm_head.weight", table)), done
        finally:
            shutil.rmtree(folder)

    return {"trials": trials(seed, count, trial), **figures}


SUITES = (Fault("files of tensors, against transformers", 16, 1000, random_tensors),)
