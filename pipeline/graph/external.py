"""Arguments of steps that name data outside the store.

    @step(output=Documents, version=1)
    def sample(run: StepContext, source: Annotated[str, External(list_source, absolute)]) -> Result:

The value stays what the annotation says, and is in the key. What it stands for is listed once a
command, and the listing's digest takes the value's place in the recipe (see
`pipeline.identity.listing`): an output made from another listing is stale.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.identity.listing import Listing, difference

CHECK_SECONDS = 60.0  # of listing a location again while a step runs


def unchanged(value: Any) -> Any:
    """The value itself."""
    return value


@dataclass(frozen=True)
class External:
    """Marks an argument as `Annotated[str, External(...)]`; a value of None names nothing.

    Attributes:
        list: (value, seconds) -> what the value stands for now, or a `PonenteError` or `OSError`
            when no store answers within these seconds.
        absolute: the value with relative local paths made absolute, which is what the key and the
            step's body get.
    """

    list: Callable[[Any, float], Listing]
    absolute: Callable[[Any], Any] = unchanged


def read_externals(function: Callable[..., Any]) -> dict[str, External]:
    """The arguments of a step function that are marked, by name."""
    hints = typing.get_type_hints(function, include_extras=True)
    found = {}
    for name in inspect.signature(function).parameters:
        for mark in getattr(hints.get(name), "__metadata__", ()):
            if isinstance(mark, External):
                found[name] = mark
    return found


def check_unchanged(
    label: str,
    externals: Mapping[str, External],
    arguments: Mapping[str, Any],
    planned: Mapping[str, Listing],
) -> None:
    """Refuse external arguments that no longer stand for what was planned with.

    Args:
        label: of the step, for messages.
        externals: of the step.
        arguments: of the call.
        planned: the listings by argument; pinned ones are not asked for again.

    Raises:
        InputError: naming the files that changed.
        StorageError: the location cannot be listed.
    """
    for name, listing in planned.items():
        if listing.pinned:
            continue
        now = externals[name].list(arguments[name], CHECK_SECONDS)
        if now.digest != listing.digest:
            changes = difference(listing.summary, listing.files, now)
            raise InputError(
                f"{label}({name}=...): expected the files that were planned with, found "
                f"{changes}; run again to use what is there now, and leave it as it is meanwhile"
            )
