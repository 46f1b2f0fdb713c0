"""Price of one chip for one hour: dated list prices, which a file of the user's can replace.

Prices differ by region, contract and month, so each has its date and source, and an unknown price
is None. `PONENTE_PRICES` names a TOML file whose tables replace those in this module:

    [v6e]
    on_demand = 2.97
    spot = 1.19
    date = "2026-11-01"
    source = "europe-west4, price list"
"""

from __future__ import annotations

import datetime
import os
import tomllib
from collections.abc import Mapping

import msgspec

from pipeline.accelerators import GPUS, TPUS
from pipeline.errors import InputError
from pipeline.store.decode import decode

VARIABLE = "PONENTE_PRICES"


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """US dollars for an hour of one chip.

    None where it is not known; `date` is year-month-day, `source` says for which region.
    """

    on_demand: float | None = None
    spot: float | None = None
    date: str
    source: str

    def __post_init__(self) -> None:
        datetime.date.fromisoformat(self.date)
        for name in ("on_demand", "spot"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}: expected dollars an hour, found {value}")

    def of(self, chip_hours: float) -> str:
        known = (("on demand", self.on_demand), ("spot", self.spot))
        amounts = [f"${each * chip_hours:,.2f} {name}" for name, each in known if each is not None]
        return f"{', '.join(amounts)} ({self.source}, {self.date})" if amounts else ""


_CATALOG = "github.com/skypilot-org/skypilot-catalog 006059e"  # as read on the price's date
_LAMBDA = "8 GPUs at Lambda, lambda.ai/instances"
PRICES: Mapping[str, Price] = {
    "v4": Price(on_demand=3.22, spot=0.9215, date="2026-11-27", source=f"us-central2, {_CATALOG}"),
    "v5e": Price(on_demand=1.2, spot=0.24493, date="2026-11-27", source=f"us-central1, {_CATALOG}"),
    "v5p": Price(on_demand=4.2, spot=0.8357, date="2026-11-27", source=f"us-central1, {_CATALOG}"),
    "v6e": Price(
        on_demand=2.70,
        spot=0.540137,
        date="2026-06-04",
        source="us-central1, price snapshot of github.com/tucan9389/nanochat-jax",
    ),
    "a100": Price(on_demand=2.79, date="2026-09-20", source=_LAMBDA),
    "h100": Price(on_demand=3.99, date="2026-09-20", source=_LAMBDA),
    "h200": Price(on_demand=5.4, date="2026-10-24", source="Nebius, by renshuBTC/compute-screener"),
    "b200": Price(on_demand=6.69, date="2026-09-20", source=_LAMBDA),
}
"""By chip of `pipeline.accelerators`; a chip without an entry has no public price (v7x)."""


def price_of(chip: str) -> Price | None:
    path = os.environ.get(VARIABLE)
    return {**PRICES, **(read_prices(path) if path else {})}.get(chip)


def read_prices(path: str) -> dict[str, Price]:
    """Prices of a TOML file, by chip; `InputError` for one that has others than known chips."""
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
        if unknown := sorted(tables.keys() - TPUS.keys() - GPUS.keys()):
            raise ValueError(f"unknown chip {unknown[0]!r}; there are {', '.join((*TPUS, *GPUS))}")
        return {chip: decode(Price, table) for chip, table in tables.items()}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{VARIABLE}={path}: expected a table for each chip, such as [v6e], with on_demand and "
            f"spot in dollars an hour, date and source; {error}"
        ) from None
