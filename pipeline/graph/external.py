"""Arguments of steps that name data outside the store.

    @step(output=Documents, version=1)
    def sample(run: StepContext, source: Annotated[str, External(list_source, absolute)]) -> Result:

The value keeps the annotated type and is part of the key. Each command lists its files once, and
the listing's digest replaces the value in the recipe (see `pipeline.identity.listing`): an output
made from another listing is stale.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.identity.listing import Listing, difference

CHECK_SECONDS = 60.0  # timeout of listing a location again before and after a step's body


def unchanged(value: Any) -> Any:
    """The value itself."""
    return value


@dataclass(frozen=True)
class External:
    """Marks an external argument: `Annotated[str, External(...)]`; a value of None has no listing.

    Attributes:
        list: (value, seconds) -> the current listing; raises `PonenteError` or `OSError` when the
            store does not answer within these seconds.
        absolute: value -> the value with relative local paths made absolute, as used in the key
            and passed to the step's body.
    """

    list: Callable[[Any, float], Listing]
    absolute: Callable[[Any], Any] = unchanged


def read_externals(function: Callable[..., Any]) -> dict[str, External]:
    """The external arguments of a step function, by name."""
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
    """Refuse external arguments whose listing changed since the run was planned.

    Args:
        label: the step's label, for messages.
        externals: the step's external arguments.
        arguments: the arguments of the call.
        planned: the listings of the plan, by argument; pinned ones cannot change and are skipped.

    Raises:
        InputError: naming the files that changed.
        StorageError: the location cannot be listed.
    """
    for name, listing in planned.items():
        if listing.pinned:
            continue
        now = externals[name].list(arguments[name], CHECK_SECONDS)
        if now.digest != listing.digest and not now.same_as(listing.files):
            changes = difference(listing.summary, listing.files, now)
            raise InputError(
                f"{label}({name}=...): expected the files that the run was planned with, found "
                f"{changes}; run again to use the current files, and do not change them meanwhile"
            )
