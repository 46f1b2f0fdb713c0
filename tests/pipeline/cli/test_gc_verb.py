"""`gc`, as a user types it: what is kept by its name."""

from __future__ import annotations

import json

from pipeline import Experiment, named
from pipeline.graph.step import as_node
from tests.pipeline.toy import numbers


def _several(*counts: int) -> Experiment:
    """Graphs of one named step per count, of which only the last is a preset's."""
    return Experiment(lambda: tuple(named(numbers(count=n), f"work[{n}, 2]") for n in counts))


def test_gc_keeps_what_is_named_by_label_or_path(ponente, tmp_path, monkeypatch):
    """As gc prints them, of earlier settings too; a word of no output is refused."""
    ponente(experiment=_several(8, 6))
    presets = _several(4)
    ponente(experiment=presets)

    def listed(*words):
        keep = [word for each in words for word in ("--keep", each)]
        tree = json.loads(ponente("gc", "--presets-only", "--json", *keep, experiment=presets)[1])
        return {item["url"].rpartition("/")[2] for item in tree["objects"]}

    six, eight = (as_node(numbers(count=n)).directory for n in (6, 8))
    assert listed() == {six, eight}
    assert listed("work[8, 2]") == {six}
    assert listed("work[8, 2],work[6, 2]") == listed("numbers") == listed("work[6, 2]", eight)
    assert listed("numbers") == set()
    monkeypatch.chdir(tmp_path)
    assert listed(f"store/{six}/,{tmp_path}/store/{eight[:-5]}") == set()
    for word in ("work[7, 2]", "nmbers", f"elsewhere/{six}", f"gs://b/{six}", "work[8, 2],x", ""):
        words = ("--presets-only", "--delete", "--yes", "--keep", word)
        status, out, err = ponente("gc", *words, experiment=presets)
        assert (status, out) == (1, ""), word
    assert "expected steps or outputs" in err
    assert listed() == {six, eight}
