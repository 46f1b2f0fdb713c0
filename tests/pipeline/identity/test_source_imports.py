"""The import scanner against Python's parser: this repository, the standard library, odd forms."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.identity import source_code

ROOT = Path(__file__).parents[3]


def imports_by_ast(text: str) -> set[source_code.Import]:
    """What Python's own parser says is imported."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {source_code.Import(0, alias.name, ()) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.add(source_code.Import(node.level, node.module or "", names))
    return found


def test_the_scanner_agrees_with_the_parser_on_every_file_of_the_repository():
    """The same imports as `ast` finds, no more and no fewer."""
    paths = [
        p
        for p in ROOT.rglob("*.py")
        if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
    ]
    assert len(paths) > 100
    for path in paths:
        text = path.read_text()
        assert set(source_code.imports(text)) == imports_by_ast(text), path


@pytest.mark.slow
def test_the_scanner_agrees_with_the_parser_on_the_standard_library():
    """The same on code in many hands' styles."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    assert len(paths) > 100
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        assert set(source_code.imports(text)) == imports_by_ast(text), path


@pytest.mark.parametrize(
    "text",
    [
        "import a.b.c as d, e\n",
        "import a, \\\n    b\n",
        "from . import x\nfrom .import y\nfrom.a import z\nfrom ... import (w)\n",
        "from a.b import (\n  c as d,  # (\n  e,\n)\nimport f\n",
        "from a \\\n  import b, \\\n  c  # import d\n",
        "if x: import a; from b import c\nelse:import d\n",
        "try:\n\timport a\nexcept ImportError: from b import *\n",
        "s = \"\"\"\nimport a\n\"\"\"\nt = '''\nfrom a import b\n'''\n",
        's = "\\"; import a"; import b\n',
        "s = '#'; import a  # '\nimport b\n",
        "def f():\n    yield from g()\n    raise ValueError from None\n",
        "important = 1\nfrom importlib import import_module\n",
        'x = f"{a:import}"\nimport b\n',
        "async def f():\n    async with x: import a\n",
        "import a\r\nfrom b import (c,\r\n  d)\r\n",
    ],
)
def test_the_scanner_agrees_with_the_parser_on_each_form(text):
    """Lines carried on, parentheses, several on a line, strings and comments."""
    assert set(source_code.imports(text)) == imports_by_ast(text)


PIECES = ["import ", "from ", "a", "b", ".", " ", "\n", "'", '"', '"""', "'''", "\\\n", "\\"]


PIECES += ["(", ")", ",", "#", ";", ":", " as ", "import a\n", "from . import b\n", "x = ", "*"]


@pytest.mark.filterwarnings("ignore")
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_can_be_scanned(text):
    """Broken files end too, and what does parse is scanned right."""
    found = set(source_code.imports(text))
    try:
        expected = imports_by_ast(text)
    except (SyntaxError, ValueError):
        return
    assert found == expected


def test_unclosed_quotes_take_no_exponential_time():
    """Half a megabyte of a broken file is scanned like any other."""
    text = "import a\n" + '"""' + 'x" \\ ' * 100_000
    assert source_code.Import(0, "a", ()) in set(source_code.imports(text))
