"""One version of a source file: digests of its bytes, of what it means and of its statements."""

from __future__ import annotations

import ast
import functools
import hashlib
import warnings
from collections.abc import Iterable, Iterator

DIGITS = 16
_SHORT = 8  # digits of a statement's digest
_IMPORTS = (ast.Import, ast.ImportFrom)
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


class SourceFile:
    """One version of a source file; one that does not parse has no imports and statements."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.raw = hashlib.sha256(data).hexdigest()[:DIGITS]

    @functools.cached_property
    def imports(self) -> tuple[ast.Import | ast.ImportFrom, ...]:
        return tuple(n for n in _statements(self._parse()) if isinstance(n, _IMPORTS))

    @functools.cached_property
    def statements(self) -> tuple[str, ...]:
        """Digest of each statement without the statements in it; not of imports and docstrings."""
        found = {
            digest_of(_describe(n, deep=False))[:_SHORT]
            for n in _statements(self._parse())
            if not isinstance(n, _IMPORTS) and not _is_comment(n)
        }
        return tuple(sorted(found))

    def _parse(self) -> ast.Module | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self._data)
        except (SyntaxError, ValueError, RecursionError):
            return None

    @functools.cached_property
    def meaning(self) -> str:
        tree = self._parse()
        return self.raw if tree is None else digest_of(_describe(tree))


def _statements(node: ast.AST | None) -> Iterator[ast.AST]:
    """Every statement in a node, at any depth; expressions contain none."""
    for name in _BODIES:
        for inner in getattr(node, name, None) or ():
            yield inner
            yield from _statements(inner)


def digest_of(words: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(words).encode("utf-8", "replace")).hexdigest()[:DIGITS]


def _describe(node: ast.AST, *, deep: bool = True) -> Iterator[str]:
    # Not `ast.dump`, whose text differs between Python versions: the digest must not change when
    # Python is upgraded.
    yield type(node).__name__
    for name in node._fields:
        value = getattr(node, name, None) if deep or name not in _BODIES else None
        if isinstance(value, ast.AST):
            yield name
            yield from _describe(value)
        elif isinstance(value, list):
            if isinstance(node, ast.JoinedStr):
                # Some versions put empty strings between the parts of an f-string.
                value = [each for each in value if getattr(each, "value", None) != ""]
            if value:
                yield name
                for each in value:
                    if not isinstance(each, ast.AST):
                        yield repr(each)
                    elif not _is_comment(each):
                        yield from _describe(each)
                yield "]"
        elif value is not None and name != "kind":
            yield f"{name} {value!r}"
    yield ")"


def _is_comment(node: ast.AST) -> bool:
    """Whether the node is a string as a statement: a docstring, or a comment in quotes."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
