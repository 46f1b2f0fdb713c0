"""What the verbs say of outputs that other code built, and of those that were never built."""

from __future__ import annotations

import pytest

from pipeline import Experiment
from tests.pipeline.code_versions import mapped
from tests.pipeline.toy import numbers

AGAIN = "2 of 4 shards were built by other code (work.py): built again"
KEPT = "2 of 4 shards were built by other code (work.py): kept (--keep-shards)"


@pytest.fixture
def repaired(ponente, tmp_path):
    """An experiment whose step failed at the third of four shards, and was repaired."""
    file = tmp_path / "code" / "work.py"
    node = mapped(file, 10, bad=(2,))
    assert ponente(experiment=Experiment(lambda: node))[0] == 1
    node = mapped(file, 100)
    return Experiment(lambda: node)


def test_plan_and_run_say_what_is_built_again(ponente, repaired):
    """--strict has nothing against it."""
    for verb in (["plan", "--strict"], ["plan", "work"], ["--strict"]):
        status, out, _ = ponente(*verb, experiment=repaired)
        assert status == 0
        assert AGAIN in out, verb
    assert AGAIN not in ponente("plan", experiment=repaired)[1]
    assert ponente("verify", experiment=repaired)[0] == 0


def test_shards_that_were_kept_are_refused_by_strict_and_by_verify(ponente, repaired):
    """Before the run, and as long as the mixed output is there."""
    for verb in (["plan"], ["run"]):
        status, out, err = ponente(*verb, "--strict", "--keep-shards", experiment=repaired)
        assert status == 1
        assert KEPT in out + err
    status, out, _ = ponente("--keep-shards", experiment=repaired)
    assert status == 0
    assert KEPT in out
    for verb in ("plan", "run"):
        status, out, err = ponente(verb, "--strict", experiment=repaired)
        assert status == 1
        assert "kept 2 of 4 shards, built by other code (work.py)" in out + err
    status, out, _ = ponente("verify", experiment=repaired)
    assert status == 1
    assert "mixed" in out
    assert "build it again with --force work" in out
    assert ponente("--force", "work", experiment=repaired)[0] == 0
    assert ponente("verify", experiment=repaired)[0] == 0


def test_a_setting_that_is_true_is_shown_as_another_than_one(tmp_path, capsys):
    """Python takes them for equal."""

    def graph(shards: int = 1):
        return numbers(count=4, shards=shards)

    experiment = Experiment(graph)
    assert experiment.graph(shards=True)[0].key != experiment.graph()[0].key
    experiment.run(shards=True, prefix=str(tmp_path), executor="inline")
    assert "shards = True (preset: 1)" in capsys.readouterr().out
