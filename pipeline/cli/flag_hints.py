"""Which flag of a command line a mistyped one may mean."""

from __future__ import annotations

from pipeline.errors import NEAR


def hint(name: str, known: list[str]) -> str:
    """Which flag a wrong one may mean, or which there are at its place; empty for too many."""
    import difflib  # imported here because it would add 5 % to the engine's import time

    above, _, last = name.removeprefix("--").rpartition(".")
    places = [(flag.removeprefix("--").rpartition("."), flag) for flag in known]
    # Only the last parts are compared: what all have in front would make any two alike.
    beside = {end: flag for (place, _, end), flag in places if place == above}
    near = [beside[end] for end in difflib.get_close_matches(last, beside, 1, NEAR)]
    near += [flag for (_, _, end), flag in places if end == last or _initials(end) == last]
    ends = {end: flag for (_, _, end), flag in places if not above}
    near += [ends[end] for end in difflib.get_close_matches(last, ends, 1, NEAR)]
    if near:
        return f"; did you mean {near[0]}?"
    there = f"; expected one of {', '.join(beside.values())}"
    return there if above and beside and len(there) < 400 else ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("-"))
