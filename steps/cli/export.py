"""`ponente export`: write a model in another project's format, without a graph.

ponente export runs/train-0123456789 --to hf            a folder for transformers and vLLM
ponente export runs/train-0123456789 --to gguf          a file for llama.cpp
ponente export exported/my-model --to gguf --dtype q8_0
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection
from typing import Any

from pipeline import InputError
from pipeline.cli.context import say
from pipeline.cli.options import verb_parser
from pipeline.store import storage
from steps.checkpoints.find import find, open_tokenizer
from steps.exchange.choices import DTYPES, GGUF_DTYPES
from steps.tokens.chat_templates import chat_of

_CONFIG = "config.json"
_DTYPES = {"hf": DTYPES, "gguf": GGUF_DTYPES}
_DEFAULTS = {"hf": "bfloat16", "gguf": "f16"}


def run(arguments: list[str]) -> int:
    """Read, convert and write the model; returns the exit status 0."""
    options = _parser().parse_args(arguments)
    source, kind = storage.normalise(options.directory), options.to
    dtype = options.dtype or _DEFAULTS[kind]
    if dtype not in _DTYPES[kind]:
        known = ", ".join(_DTYPES[kind])
        raise InputError(f"--dtype: expected one of {known} with --to {kind}, found {dtype!r}")
    name = source.rpartition("/")[2]
    ending = f"-{dtype}.gguf" if kind == "gguf" else "-hf"
    out = storage.normalise(options.out or f"./{name}{ending}")
    if storage.exists(out):
        raise InputError(f"{out}: exists already; delete it, or give another --out")
    folder = storage.exists(storage.join(source, _CONFIG))
    if kind == "hf":
        if folder:
            raise InputError(f"{source}: is a Hugging Face folder already; export it --to gguf")
        written = to_hf(source, out, dtype)
        size = f"{written['bytes'] / 1e6:,.1f} MB in {len(written['files'])} files"
        say(f"{out}: {written['architecture']}, {written['parameters']} parameters, {size}")
    elif folder:
        say(_line(out, to_gguf(source, out, dtype, name, options.ignore_keys)))
    else:
        if not find(source).has_text:
            raise InputError(
                f"{source}: expected a model with a tokenizer, which a GGUF file contains; this "
                "one was trained on rows of integers. Export it --to hf"
            )
        with tempfile.TemporaryDirectory() as between:
            to_hf(source, between, "float32", auto_tokenizer=False)
            say(_line(out, to_gguf(between, out, dtype, name)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = verb_parser("export", __doc__)
    types = "; ".join(f"{kind}: {', '.join(known)}" for kind, known in _DTYPES.items())
    add = parser.add_argument
    add("directory", help="of a train step, a checkpoint in it, or a Hugging Face folder")
    add("--to", required=True, choices=tuple(_DTYPES), help="the format")
    add("--dtype", help=f"of matrices ({types}; f16 and bfloat16 by default)")
    add("--ignore-keys", metavar="KEY", nargs="+", default=(), help="unknown, in config.json")
    add("--out", metavar="PATH", help="what to write (./NAME-DTYPE.gguf or ./NAME-hf)")
    return parser


def to_hf(directory: str, out: str, dtype: str, *, auto_tokenizer: bool = True) -> dict[str, Any]:
    """Write the Hugging Face folder of a train step or checkpoint; returns as `write_hf_folder`.

    Of the EMA, if the run kept one; without a tokenizer of a model of rows of integers.
    """
    from steps.exchange.hf.hf_folder import Export, write_hf_folder

    trained = find(directory)
    export = Export(
        checkpoint=trained.path,
        config=trained.model,
        positions=trained.sequence_length,
        tokenizer=open_tokenizer(trained) if trained.has_text else None,
        chat=chat_of(trained.text_source),
        dtype=dtype,
        auto_tokenizer=auto_tokenizer,
    )
    return write_hf_folder(out, export)


def to_gguf(
    folder: str, out: str, dtype: str, name: str, ignore_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Write the GGUF file `out` of a Hugging Face folder; returns as `write_gguf`."""
    from steps.exchange.gguf.file import write_gguf
    from steps.exchange.local_files import read_locally, write_locally

    with read_locally(folder) as read, write_locally(out) as path:
        return write_gguf(read, path, dtype, name, ignore_keys)


def _line(out: str, written: dict[str, Any]) -> str:
    return (
        f"{out}: {written['architecture']}, {written['parameters']:,} parameters, tokenizer "
        f"{written['pre_tokenizer']}, {written['bytes'] / 1e6:,.1f} MB"
    )
