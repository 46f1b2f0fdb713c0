"""What the style sheet and the templates do for small screens, and for light and dark ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import pipeline.pages.page
from pipeline.pages.page import environment
from steps.pages import charts, curves
from training.config import Group, OptimizerConfig

TEMPLATES = Path(pipeline.pages.page.__file__).with_name("templates")
CSS = (TEMPLATES / "page.css").read_text()


def rule(selector: str, css: str = CSS) -> str:
    """What the style sheet says of one selector."""
    (found,) = re.findall(rf"(?:^|}}\s*|\n){re.escape(selector)} {{([^}}]*)}}", css)
    return found


def luminance(colour: str) -> float:
    """Relative luminance of sRGB by WCAG 2.2; #abc or #aabbcc."""
    digits = colour.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Ratio by WCAG 2.2, 1 to 21."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_by_known_pairs():
    """Black on white, and the grey that is known to just pass as text on it."""
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#fff") == pytest.approx(4.54, abs=0.005)


def test_curves_are_seen_on_light_and_dark_cards():
    """Graphics need 3 to 1, text 4.5 to 1 (WCAG 2.2, 1.4.11 and 1.4.3)."""
    cards = re.findall(r"--card:(#\w+)", CSS)
    assert len(cards) == 2
    words = (re.findall(rf"--{name}:(#\w+)", CSS) for name in ("ink", "soft"))
    parts = [colour for _, colour in charts.PARTS.values()]
    names = set(
        re.findall(r"var\(--(\w+)\)", f"{curves.COLOURS} {curves.INK} {curves.GREY} {parts}")
    )
    assert len(names) == 10
    palette = [re.findall(rf"--{name}:(#\w+)", CSS) for name in names]
    for card, drawn, *texts in zip(cards, zip(*palette, strict=True), *words, strict=True):
        assert min(contrast(colour, card) for colour in drawn) >= 3
        assert min(contrast(text, card) for text in texts) >= 4.5


def test_a_small_screen_has_readable_pages():
    """Rows of the timeline fold; what is wide scrolls, with a shadow where there is more."""
    narrow = CSS[CSS.index("@media (max-width:640px)") :]
    assert rule(".row,figure .row", narrow) == " grid-template-columns:1fr auto "
    scroll = rule(".scroll")
    assert "overflow-x:auto" in scroll
    assert scroll.count("no-repeat local") == scroll.count("var(--shade),transparent") == 2
    assert {"width:100%", "height:auto"} <= set(re.split("[; ]+", rule(".chart svg")))
    # No box cuts what is in it between two lines.
    assert not re.search(r"max-height|overflow-y", CSS)
    assert rule(".charts > :only-child") == " grid-column:1/-1 "
    parts = environment().get_template("parts.html").module
    for made in (parts.pairs("Result", {"a": 1}), parts.settings({"a": 1})):
        assert re.search(r'<div class="scroll"><table class="pairs">', made)


def test_nested_settings_without_a_value_have_no_row():
    """An optimizer's seven groups would be 42 rows of None; a setting that is None is shown."""
    optimizer = OptimizerConfig(head=Group(learning_rate=0.004))
    shown = (
        environment()
        .get_template("parts.html")
        .module.settings({"optimizer": dataclasses.asdict(optimizer), "at": None})
    )
    rows = re.findall(r"<th[^>]*>([^<]*)</th><td[^>]*>([^<]*)</td>", str(shown))
    assert ("optimizer.head.learning_rate", "0.004") in rows
    assert ("at", "None") in rows
    assert [name for name, _ in rows if name.count(".") > 1] == ["optimizer.head.learning_rate"]
    assert ("optimizer.muon_row_beta", "None") in rows
