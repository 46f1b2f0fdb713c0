"""The HTML of reports and comparisons, from templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.pages.page import environment

_TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """The page of the template `<template>.html` with the values."""
    return environment(_TEMPLATES).get_template(f"{template}.html").render(**values)


def script(name: str) -> str:
    """A script as the pages have it."""
    return environment(_TEMPLATES).get_template(name).render()


class Best(str):
    """A table cell that the page marks as the best of its row."""

    best = True
