"""Every relative link and anchor of the pages leads somewhere, and so do paths and names."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import (
    PACKAGES,
    ROOT,
    anchors,
    definition,
    exists,
    fields,
    inline_code,
    pages,
    prose,
    text,
)

PAGES = pages()
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CONFIGS = {
    "TrainConfig": "training.config",
    "OptimizerConfig": "training.config",
    "Parallelism": "training.config",
    "AxisRules": "training.config",
    "TransformerConfig": "models.shape.config",
    "Sampling": "models.generate.sampling_config",
    "Limits": "training.evaluate.programs.sandbox",
    "Also": "steps",
}


def broken(page, whole: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for target in _LINK.findall(re.sub(r"`[^`\n]*`", "", whole)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in anchors(text(file))
        ):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Files exist, and headings of that name are in them."""
    assert broken(page, prose(page)) == []


def test_pages_of_the_site_link_inside_it():
    """A link out of docs/ would be dead in the built site."""
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            there = [(page.parent / path).resolve() for path in _LINK.findall(prose(page))]
            out = [path for path in there if path.exists() and ROOT / "docs" not in path.parents]
            assert out == []


def test_the_check_of_links_can_fail():
    """A page, an anchor and a file that are not there are seen; what is there is not."""
    page = ROOT / "docs" / "start.md"
    good = "[a](data.md) [b](data.md#sampling) [c](https://nowhere.invalid/#d)"
    assert broken(page, good) == []
    assert len(broken(page, "[a](date.md) [b](data.md#samples) [c](../steps/none.py)")) == 3


def missing(code: str) -> bool:
    """Whether an inline code names a file, module or config field of ours that is not there."""
    if re.fullmatch(rf"({'|'.join(PACKAGES)}|docs)/[\w/.-]+\.(py|md|json|csv|ipynb)", code):
        return not (ROOT / code).exists()
    if re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+", code) and not code.endswith((".py", ".md")):
        return not exists(code)
    if match := re.match(rf"({'|'.join(CONFIGS)})\.(\w+)", code):
        return match[2] not in fields(definition(CONFIGS[match[1]], match[1]))
    return False


@pytest.mark.slow
def test_names_in_the_text_exist():
    """Files, modules and fields in backticks, and what the reference takes from docstrings."""
    wrong = [(str(p.relative_to(ROOT)), c) for p in PAGES for c in inline_code(p) if missing(c)]
    drawn = [(p.name, name) for p in PAGES for name in re.findall(r"^::: (\S+)", text(p), re.M)]
    assert len(drawn) > 20
    assert wrong + [(page, name) for page, name in drawn if not exists(name)] == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("TrainConfig.ema", False),
        ("TrainConfig.average", True),
        ("training/cost/step_time.py", False),
        ("training/cost/none.py", True),
        ("training.cost.step_time", False),
        ("training.cost.step_times", True),
        ("steps.documents.sample", False),
        ("steps.sampled", True),
    ],
)
def test_the_check_of_names_can_fail(code, wrong):
    """Each kind of name is looked up."""
    assert missing(code) is wrong
