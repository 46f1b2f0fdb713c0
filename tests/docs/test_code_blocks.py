"""Python blocks compile, import what exists, and pass keywords that exist."""

from __future__ import annotations

import ast

import pytest

from tests.docs.pages import PACKAGES, Block, blocks, definition, keywords, pages

BLOCKS = [each for page in pages() for each in blocks(page) if each.language == "python"]


def parsed(block: Block) -> ast.Module:
    """The block's syntax tree; one that ends with a signature is completed."""
    body = block.text.rstrip()
    return ast.parse(f"{body}\n    ..." if body.endswith(":") else body)


def mistakes_of(block: Block) -> list[str]:
    """What is wrong with a block."""
    try:
        return mistakes(parsed(block))
    except SyntaxError as error:
        return [str(error)]


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names that a block has from the project: what they are called there, by module and name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module or "", alias.name)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    found[alias.asname or alias.name] = (alias.name, "")
    return found


def called(node: ast.Call, names: dict[str, tuple[str, str]]) -> tuple[str, str] | None:
    """Module and name of the project's function that a call calls; None for any other."""
    match node.func:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if definition("steps", name) is not None:
            return "steps", name
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
            owner == "steps" or names.get(owner, ("", "x"))[1] == ""
        ):
            return ("steps" if owner == "steps" else names[owner][0]), name
    return None


def mistakes(tree: ast.Module) -> list[str]:
    """Names and keywords of a block that the project does not have."""
    names = imported(tree)
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    wrong = [
        f"{module}.{name}"
        for module, name in names.values()
        if name and definition(module, name) is None
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (target := called(node, names)) is None:
            continue
        if target[1] in own:
            continue
        found = definition(*target)
        if found is None:
            wrong.append(".".join(target))
            continue
        known = keywords(found)
        passed = {each.arg for each in node.keywords if each.arg}
        wrong += [f"{'.'.join(target)}({name}=)" for name in passed - (known or passed)]
    return wrong


def test_python_blocks_are_right():
    """Syntax, imports and keywords."""
    assert len(BLOCKS) > 30
    wrong = {block.where: found for block in BLOCKS if (found := mistakes_of(block))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from pipeline import Experiment, step", []),
        ("from pipeline import Experiments", ["pipeline.Experiments"]),
        ("import steps\nsteps.sample('x', tokens=-1)", []),
        ("import steps\nsteps.samples('x')", ["steps.samples"]),
        ("train(s, training=1)", ["steps.train(training=)"]),
        (
            "from training.config import TrainConfig as T\nT(batch=1)",
            ["training.config.TrainConfig(batch=)"],
        ),
    ],
)
def test_the_check_can_fail(code, wrong):
    """Imports, attributes and keywords are each looked up."""
    assert mistakes(ast.parse(code)) == wrong
