"""Pages, their code blocks, and what the source says of a name, read without importing it."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "steps", "data", "models", "training", "experiments", "tests")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}[^\n]*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: path below the root.
        line: of the page, from 1.
        language: after the fence; "" without one, and of an indented block.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page that people read."""
    top = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    below = [*(ROOT / "experiments").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [*top, *sorted(below)]


@functools.cache
def text(page: Path) -> str:
    """A page as it is."""
    return page.read_text()


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Fenced and indented code blocks of a page."""
    name, whole = str(page.relative_to(ROOT)), text(page)
    found = [
        Block(name, whole.count("\n", 0, m.start()) + 1, m[2], textwrap.dedent(m[3]))
        for m in _FENCE.finditer(whole)
    ]
    rest = _FENCE.sub(lambda m: "\n" * m[0].count("\n"), whole)
    found += [
        Block(name, rest.count("\n", 0, m.start()) + 1, "", textwrap.dedent(m[0]))
        for m in _INDENTED.finditer(rest)
    ]
    return tuple(found)


@functools.cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text(page))


def inline_code(page: Path) -> list[str]:
    """What stands between backticks in the prose, but for other systems' code.

    Theirs is in the first column of tables of the pages that compare.
    """
    ours = prose(page)
    if page.parent.name in ("coming_from", "systems"):
        ours = re.sub(r"^\|[^|]*\|", "|", ours, flags=re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", ours)]


def anchors(whole: str) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*?) *$", _FENCE.sub("", whole), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", slug))
    return found


@functools.cache
def _tree(module: str) -> ast.Module | None:
    base = ROOT.joinpath(*module.split("."))
    for file in (base / "__init__.pyi", base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text())
    return None


@functools.cache
def definition(module: str, name: str) -> ast.AST | None:
    """What a module calls by a name: its definition where there is one; None for no such name."""
    tree = _tree(module)
    if tree is not None:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return definition(node.module, alias.name) or node
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return node
    inside = _tree(f"{module}.{name}")
    if inside is None and ROOT.joinpath(*module.split("."), name).is_dir():
        return ast.Pass()
    return inside


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of a module or of a class in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if _tree(module) is None and not ROOT.joinpath(*parts[:end]).is_dir():
            continue
        if end == len(parts):
            return True
        found = definition(module, parts[end])
        more = parts[end + 1 :]
        return found is not None and (not more or more[0] in fields(found) or not _is_class(found))
    return False


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def fields(node: ast.AST) -> set[str]:
    """Names of a class' annotated fields, attributes and methods."""
    if not isinstance(node, ast.ClassDef):
        return set()
    named = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    return named | {n.name for n in node.body if isinstance(n, ast.FunctionDef)}


def keywords(node: ast.AST) -> set[str] | None:
    """Keyword arguments that a function, or a dataclass, takes; None for any, or where unknown."""
    if isinstance(node, ast.ClassDef):
        own = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        is_data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        return keywords(own[0]) if own else fields(node) if is_data else None
    if not isinstance(node, ast.FunctionDef) or node.args.kwarg is not None:
        return None
    return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
