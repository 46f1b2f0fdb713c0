"""One absurd value in the folder of a model: an import and an export to GGUF refuse it (fault 54).

Each trial changes one thing in a sound folder. What comes of it is one line that names the file, or
a model; never a traceback, and never memory or time for what the value promises.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from steps.exchange.gguf.file import write_gguf
from steps.exchange.hf.read_hf import open_hf, write_checkpoint
from tests.faults.registry import Fault, pick, trials
from tests.steps.exchange.hf_folders import INDEX, SMALL, SMALL_FILES, write_small

_LINE = 700  # characters of a message, its path included
_HUGE = 2**62
Damage = Callable[[Path, random.Random], list[str]]
"""Changes a folder; returns words of the refusal, or none where the folder may still be sound."""


def _key(name: str, *values: Any) -> Damage:
    def change(folder: Path, draw: random.Random) -> list[str]:
        (folder / "config.json").write_text(json.dumps({**SMALL, name: draw.choice(values)}))
        return ["config.json"]

    return change


def _file(name: str, *contents: bytes) -> Damage:
    def change(folder: Path, draw: random.Random) -> list[str]:
        (folder / name).write_bytes(draw.choice(contents))
        return [name]

    return change


def _index(change: Callable[[dict[str, Any]], Any], *words: str) -> Damage:
    def changed(folder: Path, draw: random.Random) -> list[str]:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(index)))
        return list(words or (INDEX,))

    return changed


def _header(change: Callable[[dict[str, Any]], Any], *words: str) -> Damage:
    """The JSON in front of a safetensors file, with other content and the right length."""

    def changed(folder: Path, draw: random.Random) -> list[str]:
        path = folder / draw.choice(SMALL_FILES)
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        return list(words or (path.name,))

    return changed


def _tensor(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for name, value in sorted(header.items()) if name != "__metadata__")


def _header_length(folder: Path, draw: random.Random) -> list[str]:
    path = folder / draw.choice(SMALL_FILES)
    data = bytearray(path.read_bytes())
    data[:8] = draw.choice((0, 1 << 20, 1 << 40, _HUGE, 2**64 - 1)).to_bytes(8, "little")
    path.write_bytes(data)
    return [path.name]


def _truncated(folder: Path, draw: random.Random) -> list[str]:
    path = folder / draw.choice([*SMALL_FILES, "config.json", "tokenizer.json", INDEX])
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data) - 1)])
    return [path.name]


def _flipped(folder: Path, draw: random.Random) -> list[str]:
    """A bit of what is no number of a tensor: refused, or a model of another shape or name."""
    path = folder / draw.choice([*SMALL_FILES, "config.json", INDEX])
    data = bytearray(path.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    data[draw.randrange(size)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return []


def _missing(folder: Path, draw: random.Random) -> list[str]:
    path = folder / draw.choice([*SMALL_FILES, "config.json", "tokenizer.json"])
    path.unlink()
    return [path.name]


_NAMES = ("num_hidden_layers", "vocab_size", "hidden_size", "head_dim", "num_key_value_heads")
_NOT_COUNTS = (_HUGE, -1, 0, 1.5, "4", [4], {}, True, 10**400)
_DEEP = b"[" * 100_000 + b"]" * 100_000
_KINDS: dict[str, Damage] = {
    **{f"{name} is absurd": _key(name, *_NOT_COUNTS) for name in _NAMES},
    "many layers": _key("num_hidden_layers", 4, 9_999),
    "epsilon is absurd": _key("rms_norm_eps", "x", [], 10**400),
    "rope of no kind": _key("rope_parameters", {"rope_type": ["default"]}, {"rope_type": "new"}),
    "rope is no object": _key("rope_parameters", [1], "x", 7, {"full": {"rope_type": "default"}}),
    "layers of no kind": _key("layer_types", 7, [[1]] * 3, [1, "x", None], ["new"] * 3),
    "architecture of no kind": _key("architectures", [["x"]], "Qwen3", 7, ["x" * 10**6]),
    "config.json is no object": _file("config.json", b"[]", b"7", b'"x"', b"null", b"{}"),
    "config.json is nested": _file("config.json", b'{"a": ' + _DEEP + b"}", _DEEP),
    "config.json is no text": _file("config.json", b"\xff\xfe\x00", b"\x00" * 99, b'{"a": NaN}'),
    "index is no object": _file(INDEX, b"[]", b"7", b"null", _DEEP, b'{"weight_map": []}'),
    "index names no files": _index(lambda i: {"weight_map": dict.fromkeys(i["weight_map"], 7)}),
    "index names a file elsewhere": _index(
        lambda i: {"weight_map": dict.fromkeys(i["weight_map"], "../../etc/passwd")}, "passwd"
    ),
    "index names no file": _index(
        lambda i: {"weight_map": dict.fromkeys(i["weight_map"], "")}, "safetensors"
    ),
    "index names a zero byte": _index(
        lambda i: {"weight_map": dict.fromkeys(i["weight_map"], "a\0b")}, "safetensors"
    ),
    "index of nothing": _index(lambda i: {"weight_map": {}}, "is missing"),
    "index of more": _index(lambda i: {"weight_map": {**i["weight_map"], "x": "y"}}, "safetensors"),
    "header's length": _header_length,
    "huge tensor": _header(lambda h: _tensor(h).update(shape=[_HUGE, 4])),
    "tensor beyond the end": _header(lambda h: _tensor(h).update(data_offsets=[0, _HUGE])),
    "tensor of a negative size": _header(lambda h: _tensor(h).update(data_offsets=[9, 1])),
    "tensor of no dtype": _header(lambda h: _tensor(h).update(dtype="X99")),
    "tensor of whole numbers": _header(lambda h: _tensor(h).update(dtype="I16"), "has dtype I16"),
    "tensor of another shape": _header(lambda h: _tensor(h)["shape"].append(1), "has shape"),
    "header is no object": _header(lambda h: h.update({"x": 7})),
    "a file is missing": _missing,
    "a file is cut short": _truncated,
    "a flipped bit": _flipped,
}
KINDS = tuple(_KINDS)


def absurd_models(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Every kind is an `InputError` of one line, from the import and from the export to GGUF."""
    sound = workspace / "sound"
    sound.mkdir()
    write_small(sound)
    open_hf(str(sound))
    write_gguf(str(sound), str(workspace / "sound.gguf"), "f16", "sound")
    figures = {"refused": 0, "read": 0}

    def trial(number: int) -> None:
        draw = random.Random(number)
        kind = KINDS[pick(number, len(KINDS))]
        folder = shutil.copytree(sound, workspace / "model")
        try:
            words = _KINDS[kind](folder, draw)
            for name, read in (("import", _import), ("GGUF", _export)):
                line = _line(lambda read=read: read(folder, workspace))
                if line is None:
                    assert not words, f"{kind}: {name}: was read"
                    figures["read"] += 1
                    continue
                assert "\n" not in line, f"{kind}: {name}: {line[:_LINE]!r}"
                assert len(line) < _LINE, f"{kind}: {name}: {line[:_LINE]!r}"
                assert all(word in line for word in words), f"{kind}: {name}: {words}: {line}"
                figures["refused"] += 1
        finally:
            shutil.rmtree(folder)
            shutil.rmtree(workspace / "checkpoint", ignore_errors=True)

    return {"trials": trials(seed, count, trial), **figures}


def _import(folder: Path, workspace: Path) -> None:
    write_checkpoint(open_hf(str(folder))[0], str(workspace / "checkpoint"))


def _export(folder: Path, workspace: Path) -> None:
    write_gguf(str(folder), str(workspace / "model.gguf"), "f16", "model")


def _line(action: Callable[[], None]) -> str | None:
    """What it was refused with; None where it was not."""
    try:
        action()
    except InputError as error:
        return str(error)
    return None


FAULTS = {54: [Fault("absurd values in a model's folder", len(KINDS), 2000, absurd_models)]}
