"""A value that looks like a secret is refused where it is declared, and recorded nowhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipeline import Experiment, InputError, Result, StepContext, step
from pipeline.identity.secret_text import is_secret_name
from tests.pipeline.toy import Total

CANARY = "CANARY1234567890"
SIGNED = f"https://host/x.parquet?X-Amz-Signature={CANARY}"


@dataclass(frozen=True)
class Source:
    """A configuration with text inside."""

    url: str
    headers: tuple[str, ...] = ()


@step(output=Total, version=1)
def fetch(run: StepContext, *, source: str = SIGNED, more: object = None) -> Result:
    return {"total": 0}


def refusal(declare):
    """The error that a declaration raises, which does not repeat the value."""
    with pytest.raises(InputError, match="looks like a secret") as error:
        declare()
    assert CANARY not in str(error.value)
    return str(error.value)


def test_a_default_and_a_preset_of_an_experiment_are_refused():
    """Also inside a configuration and a tuple; the setting is named."""

    def default(source: str = SIGNED) -> Total:
        return fetch(source=source)

    def plain(source: Source = Source("https://host/x")) -> Total:
        return fetch(source=source.url)

    assert "setting 'source' of preset 'full'" in refusal(lambda: Experiment(default))
    nested = Source("https://host/x", (f"https://me:{CANARY}@host",))
    assert "'source' of preset 'mine'" in refusal(
        lambda: Experiment(plain, mine={"source": nested})
    )
    assert "its value looks like a secret" in refusal(
        lambda: Experiment(plain).plan(source=Source(SIGNED))
    )
    assert Experiment(plain).graph()[0].config["source"] == "https://host/x"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"source": SIGNED},
        {"source": "x", "more": ({"url": [SIGNED]},)},
        {"source": "x", "more": {SIGNED: 1}},
    ],
    ids=["the step's default", "a text", "inside a value", "a key"],
)
def test_a_step_is_refused_a_secret_in_its_configuration(arguments):
    """Wherever it is written in the graph: in a call, or as the default of the step itself."""
    assert "fetch(" in refusal(lambda: fetch(**arguments))


@pytest.mark.parametrize(
    ("name", "secret"),
    [("--hf-token", True), ("API_KEY", True), ("key.id", True), ("--model.query-key-scale", False)],
)
def test_a_name_of_a_number_is_no_secret(name, secret):
    """A key's scale is a setting; whatever else has the word is refused."""
    assert is_secret_name(name) == secret
