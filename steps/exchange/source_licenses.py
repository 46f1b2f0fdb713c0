"""Licences of the training data, as sections of a model's card and of its data's card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from data.sources import License, license_of
from pipeline.plan.lineage import Ancestor


def known_licenses(ancestors: Iterable[Ancestor]) -> dict[str, License]:
    """Licence by repository of the data sets among the sources whose licence is known."""
    places = (s.where for ancestor in ancestors for s in ancestor.manifest.sources.values())
    return dict(sorted(found for place in places if (found := license_of(place)) is not None))


def restrictions(known: Mapping[str, License]) -> list[str]:
    lines = [f"- {name}: {license}" for name, license in known.items() if not license.commercial]
    return ["## Restrictions of the training data", "", *lines, ""] if lines else []


def licenses(known: Mapping[str, License], given: Sequence[str]) -> list[str]:
    found = [f"{name}: {license}" for name, license in known.items()]
    lines = [f"- {escaped(text)}" for text in (*found, *given)] or ["Not stated in the export."]
    return ["## Licences of the sources", "", *lines, ""]


def escaped(text: str) -> str:
    """A text inside a line or a table cell of Markdown."""
    return text.replace("\n", " ").replace("|", "\\|")
