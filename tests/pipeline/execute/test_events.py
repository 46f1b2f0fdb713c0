"""What becomes of the events of a run."""

from __future__ import annotations

from pipeline.execute.events import EventLog


def test_a_listener_that_fails_is_dropped_and_the_others_hear_of_it(tmp_path):
    """Once; the log and the other listeners get every event."""
    calls, seen = [], []

    def closed(event):
        calls.append(event)
        raise BrokenPipeError("closed")

    log = EventLog(str(tmp_path), "r", [closed, seen.append])
    log.emit({"event": "first"})
    log.emit({"event": "second"})
    log.close()
    assert len(calls) == 1
    assert [e["event"] for e in seen] == ["listener_lost", "first", "second"]
    assert (tmp_path / "events" / "r.jsonl").read_text().count("\n") == 3
