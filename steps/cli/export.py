"""`ponente export`: a model in another project's format, without a graph.

ponente export exported/my-model --to gguf --dtype q8_0
"""

from __future__ import annotations

import argparse
from typing import Any

from pipeline import InputError
from pipeline.cli.context import say
from pipeline.store import storage
from steps.export.gguf_types import TYPES

_CONFIG = "config.json"


def run(arguments: list[str]) -> int:
    """Read, convert, write; 0."""
    options = _parser().parse_args(arguments)
    source = storage.normalise(options.directory)
    if not storage.exists(storage.join(source, _CONFIG)):
        raise InputError(f"{source}: expected a Hugging Face folder, found no {_CONFIG}")
    name = source.rpartition("/")[2]
    out = storage.normalise(options.out or f"./{name}-{options.dtype}.gguf")
    if storage.exists(out):
        raise InputError(f"{out}: exists already; delete it, or give another --out")
    say(_line(out, to_gguf(source, out, options.dtype, name)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ponente export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", help="a Hugging Face folder: a path or URL")
    add("--to", required=True, choices=("gguf",), help="the format")
    add("--dtype", default="f16", choices=TYPES, help="of matrices (%(default)s)")
    add("--out", metavar="PATH", help="the file to write (./NAME-DTYPE.gguf)")
    return parser


def to_gguf(folder: str, out: str, dtype: str, name: str) -> dict[str, Any]:
    """Write the GGUF file `out` of a Hugging Face folder; what `write_gguf` returns."""
    from steps.export.gguf_file import write_gguf
    from steps.export.local_files import read_locally, write_locally

    with read_locally(folder) as read, write_locally(out) as path:
        return write_gguf(read, path, dtype, name)


def _line(out: str, written: dict[str, Any]) -> str:
    return (
        f"{out}: {written['architecture']}, {written['parameters']:,} parameters, tokenizer "
        f"{written['pre_tokenizer']}, {written['bytes'] / 1e6:,.1f} MB"
    )
