"""Dated prices of chips, and a file of the user's own in their place."""

import datetime

import pytest

from pipeline.accelerators import GPUS, TPUS
from pipeline.errors import InputError
from pipeline.prices import PRICES, Price, price_of

MINE = """
[v6e]
on_demand = 2.97
spot = 1
date = "2026-11-01"
source = "europe-west4"

[v7x]
spot = 3.0
date = "2026-11-02"
source = "a contract"
"""


def test_every_price_is_of_a_known_chip_and_has_a_date_and_a_source():
    for chip, price in PRICES.items():
        assert chip in {*TPUS, *GPUS}
        assert datetime.date(2024, 1, 1) < datetime.date.fromisoformat(price.date)
        assert price.source
        assert price.on_demand is not None
        assert price.spot is None or price.spot < price.on_demand


def test_a_cost_in_words():
    """Chip-hours times dollars; a price that is not known is not shown."""
    price = Price(on_demand=2.5, date="2026-01-02", source="a list")
    assert price.of(1000) == "$2,500.00 on demand (a list, 2026-01-02)"
    assert Price(date="2026-01-02", source="a list").of(1000) == ""


def test_ones_own_file_takes_the_place_of_the_table(tmp_path, monkeypatch):
    """Chips that it does not name keep their price, or have none."""
    monkeypatch.delenv("PONENTE_PRICES", raising=False)
    assert price_of("v6e") == PRICES["v6e"]
    assert price_of("v7x") is None
    file = tmp_path / "prices.toml"
    file.write_text(MINE)
    monkeypatch.setenv("PONENTE_PRICES", str(file))
    expected = Price(on_demand=2.97, spot=1.0, date="2026-11-01", source="europe-west4")
    assert price_of("v6e") == expected
    assert price_of("v7x") == Price(spot=3.0, date="2026-11-02", source="a contract")
    assert price_of("h100") == PRICES["h100"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[v9]\n", "unknown chip 'v9'"),
        ("[v6e]\nspot = 1.0\n", "source"),
        (MINE.replace("spot", "sport"), "sport"),
        (MINE.replace("2.97", "-1"), "found -1"),
        (MINE.replace("2.97", "nan"), "found nan"),
        (MINE.replace("2026-11-01", "last May"), "last May"),
        ("v6e = 3", "expected a table"),
        ("[v6e", "expected a table"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text, problem, tmp_path, monkeypatch):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    monkeypatch.setenv("PONENTE_PRICES", str(file))
    with pytest.raises(InputError, match=r"PONENTE_PRICES=.*expected a table") as error:
        price_of("v6e")
    assert problem in str(error.value)
