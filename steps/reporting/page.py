"""The HTML of reports and comparisons, from templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.pages.page import environment

_TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """A page: what the template `<template>.html` makes of the values."""
    return environment(_TEMPLATES).get_template(f"{template}.html").render(**values)


class Best(str):
    """A cell of a table that its page shows as the best of its row."""

    best = True
