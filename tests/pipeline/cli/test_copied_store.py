"""A store that was copied or moved: nothing in it leads to where it was."""

from __future__ import annotations

import shutil

import pytest

from pipeline import Experiment, InputError, Result, StepContext, step
from pipeline.store import storage
from pipeline.store.manifest import OUTPUT
from tests.pipeline.toy import Numbers, Total, numbers


@step(output=Total, version=1)
def paged(run: StepContext, numbers: Numbers, *, fails: bool) -> Result:
    with run.shard("page") as directory:
        storage.write_atomic(storage.join(directory, "index.html"), b"page")
    if fails:
        raise InputError("asked to fail")
    inside = directory.removeprefix(run.root)
    return {"headline": [f"page: {OUTPUT}{inside}/index.html"]}


@pytest.mark.parametrize("fails", [False, True])
def test_a_copied_store_never_points_into_the_one_it_was_copied_from(tmp_path, ponente, fails):
    """Every line of every verb names the copy; the page that a run shows is there."""

    def build(fails: bool = fails):
        return paged(numbers(count=5), fails=fails)

    experiment = Experiment(build)
    ponente(experiment=experiment)
    (tmp_path / "store").rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "events")
    for verb in (("run",), ("plan",), ("status",), ("show", "numbers"), ("verify",)):
        _, out, err = ponente(*verb, experiment=experiment)
        assert str(tmp_path / "old") not in out + err
        if verb == ("run",) and not fails:
            (line,) = [line for line in out.splitlines() if line.startswith("page: ")]
            assert line.startswith(f"page: {tmp_path / 'store'}")
            assert storage.exists(line.removeprefix("page: "))
    for path in (tmp_path / "store").glob("*-*/manifest.json"):
        assert str(tmp_path) not in path.read_text()
