"""What becomes of the events of a run."""

from __future__ import annotations

import json

from pipeline import events
from pipeline.execute.event_log import EventLog
from pipeline.pages import record


def test_a_listener_that_fails_is_dropped_with_a_warning(tmp_path, caplog):
    """Once; the log and the other listeners get every event."""
    calls, seen = [], []

    def closed(event):
        calls.append(event)
        raise BrokenPipeError("closed")

    log = EventLog(str(tmp_path), "r", [closed, seen.append])
    log.emit(events.PhaseBegan("first"))
    log.emit(events.PhaseBegan("second"))
    log.close()
    assert len(calls) == 1
    assert [event.phase for event in seen] == ["first", "second"]
    assert (tmp_path / "events" / "r.jsonl").read_text().count("\n") == 2
    assert caplog.text.count("stopped showing this run: BrokenPipeError: closed") == 1


def test_progress_is_thinned_in_the_log_and_its_last_word_is_kept(tmp_path):
    seen = []
    log = EventLog(str(tmp_path), "r", [seen.append])
    for done in range(100):
        for key in ("a", "b"):
            log.emit(events.Progress(done, key=key))
    log.emit(events.Finished(key="a"))
    log.close()
    told = [json.loads(line) for line in (tmp_path / "events/r.jsonl").read_text().splitlines()]
    kept = [(e["key"], e.get("done")) for e in told]
    assert len(seen) == 201
    assert [k for k in kept if k[0] == "a"][-2:] == [("a", 99), ("a", None)]
    assert ("b", 99) in kept
    assert len(kept) < 20


def test_what_json_and_utf_8_lack_ends_no_run(tmp_path):
    """A name of a file that is no text, a number that is none: they are in log and summary."""
    log = EventLog(str(tmp_path), "r", [])
    log.emit(events.RunStarted(settings={"path": tmp_path, "rate": float("nan")}))
    log.protect()
    log.emit(events.Failed("no file \udcff", key="k"))
    log.close()
    found = record.read(str(tmp_path), "r")
    assert found.settings == {"path": str(tmp_path), "rate": None}
    assert (found.torn, found.steps["k"].cause) == (0, "no file ?")
