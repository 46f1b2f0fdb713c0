"""The one history: written once, cut where a checkpoint says, whole after a store failed."""

import json
import math
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import CorruptOutput, InputError, StoreUnavailable
from pipeline.store import storage
from pipeline.store.decode import parse_json
from training.metrics.metrics_log import (
    MEASURED,
    NAME,
    MetricsLog,
    check_history,
    content_of,
    from_relative,
    log_files,
    plain,
    read_history,
    read_log,
    tables,
    to_relative,
    write_history,
)


def new_log(directory, **changes):
    """A log whose thread does nothing by itself."""
    return MetricsLog(str(directory), every=1e6, **changes)


def steps(directory, end=None):
    return [each["step"] for each in read_log(str(directory), end)]


def test_entries_are_in_the_file_in_order_with_their_fields_as_they_were(tmp_path):
    """Written by the thread alone; a field that changes later is not seen."""
    log, fields = MetricsLog(str(tmp_path), every=0.002), {"step": 0, "path": Path("x")}
    for fields["step"] in range(500):
        log.write("step", fields)
    log.close(10)
    assert steps(tmp_path) == list(range(500))
    assert next(read_log(str(tmp_path)))["path"] == "x"


def test_a_row_that_is_not_finite_is_json_and_is_read_as_nan(tmp_path):
    """null in the file, at any depth; no other reader knows Infinity."""
    log = new_log(tmp_path)
    rows = [{"step": 1, "loss": math.nan, "norms": [1.0, math.inf]}, {"step": 2, "loss": -math.inf}]
    for row in rows:
        log.write("step", row)
    log.write("config", {"clip": math.inf, "name": None})
    log.close(10)
    write_history(str(tmp_path / "all"), log.history, [])
    for file in (tmp_path / NAME, tmp_path / "all" / NAME):
        for line in file.read_bytes().splitlines():
            parse_json(line)  # which knows no constants
    first, second, config = read_log(str(tmp_path))
    assert math.isnan(first["loss"])
    assert math.isnan(second["loss"])
    assert first["norms"] == [1.0, None]
    assert config["clip"] is config["name"] is None


attempts_at_a_run = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5
)


@pytest.mark.slow
@given(attempts_at_a_run, st.sampled_from(["", "memory://log"]))
def test_the_history_after_any_interruptions_is_that_of_a_dictionary(attempts, store):
    """Each attempt resumes from some checkpoint before the end; steps done again count once."""
    with tempfile.TemporaryDirectory() as folder:
        root = f"{store}{folder}"
        checkpoints, want, wanted = {0: ()}, {}, {}
        for index, (back, ahead) in enumerate(attempts):
            begins = sorted(checkpoints)[max(-len(checkpoints), -1 - back)]
            log = new_log(f"{root}/{index}/keep")
            log.resume(checkpoints[begins])
            want = dict(wanted.get(begins, {}))
            for step in range(begins + 1, begins + ahead + 1):
                log.write("step", {"step": step, "by": index})
                log.write("preempted", {"step": step})
                want[step] = index
                base = f"{root}/{index}/checkpoints/{step}"
                stored = json.loads(json.dumps(to_relative(log.history, base)))
                log.flush()
                checkpoints[step] = from_relative(stored, base)
                wanted[step] = dict(want)
            log.write("step", {"step": step + 1, "by": index})  # after the last checkpoint
            log.close(10)
            check_history(checkpoints[step])
            rows = tables(read_history(checkpoints[step]))["history"]
            assert {row["step"]: row["by"] for row in rows} == want
            assert [row["step"] for row in rows] == sorted(want)


def test_a_run_that_moved_with_its_logs_has_its_history(tmp_path):
    """References are relative to the checkpoint, also to another attempt's log."""
    log = new_log(tmp_path / "a" / "attempts" / "1" / "keep")
    log.write("step", {"step": 1})
    log.flush()
    base = tmp_path / "a" / "attempts" / "2" / "checkpoints" / "5"
    stored = to_relative(log.history, str(base))
    log.close(10)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = from_relative(stored, str(base).replace("/a/", "/b/"))
    assert [each["step"] for each in read_history(moved)] == [1]


def test_a_log_that_lost_its_end_is_refused(tmp_path):
    """By its size at once, and by whoever reads it."""
    log = new_log(tmp_path)
    log.write("step", {"step": 1})
    log.flush()
    log.close(10)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-1])
    for reads in (check_history, lambda history: list(read_history(history))):
        with pytest.raises(CorruptOutput, match="put the file back"):
            reads(log.history)


def test_an_attempt_has_a_log_of_its_own(tmp_path):
    new_log(tmp_path).close(10)
    with pytest.raises(InputError, match="every attempt its own name"):
        new_log(tmp_path)


def test_a_log_in_a_store_that_lost_its_end_or_is_of_an_older_version():
    """Sizes are of all its parts; earlier versions named these otherwise."""
    log = new_log("memory://parts/run")
    for step in range(3):
        log.write("step", {"step": step})
        log.flush()
    log.close(10)
    (_, size), history = log.history[-1], list(log.history)
    check_history(history)
    with pytest.raises(CorruptOutput, match=f"expected {size + 1:,} bytes .* found {size:,}"):
        check_history([(history[0][0], size + 1)])
    whole = b"".join(storage.read_bytes(url) for url, _ in log_files("memory://parts/run"))
    for begin in (0, 60):
        part = whole[begin:][: 60 if not begin else None]
        storage.write_atomic(f"memory://parts/old/metrics.{begin:015d}.jsonl", part)
    assert steps("memory://parts/old", size) == steps("memory://parts/run") == [0, 1, 2]


def test_a_store_that_fails_for_a_while_gets_everything_when_it_is_back(monkeypatch, caplog):
    """`flush` raises, so the checkpoint is not recorded; the entries are kept for the next."""
    failing, write = threading.Event(), storage.write_atomic

    def write_or_fail(url, data):
        if failing.is_set():
            raise StoreUnavailable("503")
        write(url, data)

    monkeypatch.setattr(storage, "write_atomic", write_or_fail)
    log = MetricsLog("memory://fails/run", every=0.002)
    for step in range(6):
        (failing.set if step in (2, 3) else failing.clear)()
        log.write("step", {"step": step})
        if failing.is_set():
            with pytest.raises(OSError, match="503"):
                log.flush()
            time.sleep(0.05)
        else:
            log.flush()
            assert steps("memory://fails/run") == list(range(step + 1))
    log.close(10)


def test_a_torn_last_line_is_passed_over(tmp_path):
    """A kill in the middle of a line loses that line; damage elsewhere is an error."""
    text = b'{"step": 1}\n{"step": 2}\n'
    file = tmp_path / NAME
    for end in range(len(text)):
        file.write_bytes(text[:end])
        assert steps(tmp_path) == [1, 2][: text[:end].count(b"\n")]
    file.write_bytes(b'{"st\n' + text)
    with pytest.raises(ValueError, match="line 1"):
        steps(tmp_path)
    assert steps(tmp_path / "absent") == []


def test_the_record_of_a_run_is_its_history_and_its_digest_knows_no_clock(tmp_path):
    """Two runs that differ in what a clock filled, and in attempts, have the same content."""
    found = []
    for name, cuts, seconds in (("whole", [4], 1.0), ("two", [2, 4], 2.0)):
        history, begins = (), 0
        for cut in cuts:
            log = new_log(tmp_path / name / str(cut))
            log.resume(history)
            for step in range(begins + 1, cut + 1):
                log.write(
                    "step", {"step": step, "loss": 1 / step, **dict.fromkeys(MEASURED, seconds)}
                )
            log.flush()
            history, begins = log.history, cut
            log.write("step", {"step": cut + 1, "loss": 0.0})
            log.close(10)
        record = tmp_path / f"{name}-record"
        write_history(str(record), history, [])
        rows = tables(read_log(str(record)))
        assert rows["history"] == [plain(each) for each in read_history(history)]
        found.append((content_of(history), [row["loss"] for row in rows["history"]]))
    assert found[0] == found[1]
    log = new_log(tmp_path / "other")
    log.copy(history)
    log.flush()
    assert content_of(log.history) == found[0][0]
    log.write("evaluation", {"step": 4, "split": "validation", "loss": 1.0})
    log.write("sample", {"step": 4, "prompt": "", "completion": "a"})
    log.flush()
    assert content_of(log.history) == found[0][0], "a look at the model is no part of it"
    log.write("step", {"step": 5, "loss": 1.0})
    log.flush()
    assert content_of(log.history) != found[0][0]
    log.close(10)
