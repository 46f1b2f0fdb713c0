"""`spending`: hours and dollars of a store's runs, by experiment and step."""

from __future__ import annotations

from typing import Any

from pipeline.cli.context import Context, say
from pipeline.cli.inspection import say_json
from pipeline.errors import InputError
from pipeline.execute.spending import ledger
from pipeline.pages.record import runs

_EVERY_RUN = 10**9
_HEAD = f"{'experiment, step':<40}{'hardware':<16}{'attempts':>9}{'hours':>12}{'dollars':>14}"


def spending(context: Context) -> int:
    """Print what every run in the store has spent, by the hardware that its attempts held."""
    store = context.words[0].rstrip("/") if context.words else context.store.prefix
    if len(context.words) > 1:
        raise InputError(f"spending: expected one store, found {' '.join(context.words)}")
    found = runs(store, _EVERY_RUN)
    if not found:
        raise InputError(f"spending: expected a store with runs, found none in {store}")
    experiments = ledger(found)
    dollars = sum(each["dollars"] for each in experiments)
    if context.options.json:
        say_json({"store": store, "dollars": dollars, "experiments": experiments})
        return 0
    say(f"store {store}, {len(found)} runs\n{_HEAD}")
    for each in experiments:
        say(_line(each["experiment"], each))
        for step in each["steps"]:
            say(_line(f"  {step['step']}", step))
    priced = any(step["dollars"] for each in experiments for step in each["steps"])
    say(f"${dollars:,.2f} in all, by dated prices of today" if priced else "nothing has a price")
    return 0


def _line(name: str, row: dict[str, Any]) -> str:
    hardware, attempts, hours, dollars = cells(row)
    return f"{name[:39]:<40}{hardware[:15]:<16}{attempts:>9}{hours:>12}{dollars:>14}".rstrip()


def cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Hardware, attempts, hours and dollars of a row of the ledger, as text."""
    hardware = row.get("hardware", "") + " spot" * bool(row.get("spot"))
    dollars = f"${row['dollars']:,.2f}" if row["dollars"] else ""
    return hardware, str(row["attempts"]), f"{row['hours']:,.3f}", dollars
