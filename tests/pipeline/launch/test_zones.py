"""Zones are tried in order, and one that is left has nothing that is rented, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import signal

import pytest

from pipeline.cli import launch, options
from pipeline.cli.launch import BACK_ENDS
from pipeline.errors import InputError, UsageError
from pipeline.launch import zones
from pipeline.launch.zones import Words, first_given, words
from tests.pipeline.launch.test_back_ends import job

# Of each zone it keeps whether there is a head, and a request, which a head makes; `ZONE.says` has
# what the queue says, one answer a line, the last again and again.
GCLOUD = r"""#!/bin/bash
call="$*"
zone=$(grep -oE -- '--zones?=[a-z0-9-]+' <<< "$call"); zone=${zone#*=}
echo "$call" >> "$LAB/calls"
case $call in
  "storage cp "*) ;;
  *"instances create "*)
    touch "$LAB/$zone.head"
    [ -e "$LAB/$zone.refuses" ] && exit 1
    touch "$LAB/$zone.request" ;;
  *"instances delete "*) rm "$LAB/$zone.head" ;;
  *"queued-resources delete "*)
    [ -e "$LAB/$zone.slow" ] && rm "$LAB/$zone.slow" && exit 1
    rm "$LAB/$zone.request" ;;
  *"queued-resources describe "*)
    [ -e "$LAB/$zone.request" ] || exit 1
    head -n 1 "$LAB/$zone.says"
    [ "$(wc -l < "$LAB/$zone.says")" = 1 ] || sed -i 1d "$LAB/$zone.says" ;;
  *"instances list "*) echo other; [ ! -e "$LAB/$zone.head" ] || echo run-200m-head ;;
  *"queued-resources list "*) [ ! -e "$LAB/$zone.request" ] || echo run-200m ;;
esac
"""
A, B, C = "us-east5-a", "us-east5-b", "us-east5-c"
NO_CAPACITY = 'There is no more capacity in the zone "us-east5-a" [EID: 0x1]'


class Cloud:
    """The imitated zones, and the lines about them."""

    def __init__(self, folder):
        self.folder, self.lines = folder, []
        self.zones = {z: BACK_ENDS["queued"](dataclasses.replace(job(), zone=z)) for z in (A, B, C)}

    def says(self, zone, *states, message=""):
        failed = {"failedData": {"error": {"code": 8, "message": message}}} if message else {}
        rows = [json.dumps({"name": "n", "state": {"state": s, **failed}}) for s in states]
        (self.folder / f"{zone}.says").write_text("".join(f"{row}\n" for row in rows))

    def rented(self):
        return {p.name for p in self.folder.iterdir() if p.suffix in (".head", ".request")}

    def calls(self, word):
        found = (self.folder / "calls").read_text().splitlines()
        return [line for line in found if word in line]

    def run(self, patience=3600.0, tell=None):
        return first_given(self.zones, launch._call, patience, tell or self.lines.append)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """Three zones without capacity."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gcloud").write_text(GCLOUD)
    (tmp_path / "bin/gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("LAB", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch").mkdir()
    for name in ("_POLL_SECONDS", "_LATE_SECONDS"):
        monkeypatch.setattr(zones, name, 0.0)
    made = Cloud(tmp_path)
    for zone in made.zones:
        made.says(zone, "WAITING_FOR_RESOURCES", "FAILED", message=NO_CAPACITY)
    return made


def test_the_first_zone_that_gives_the_chips_is_kept(cloud):
    """The one before it is left, the one after it is not asked; the queue's words are shown."""
    cloud.says(B, "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
    assert cloud.run() == B
    assert cloud.rented() == {f"{B}.head", f"{B}.request"}
    assert cloud.lines == [
        f"{A}: no request yet: the head is being set up",
        f"{A}: WAITING_FOR_RESOURCES: {NO_CAPACITY}",
        f"{A}: FAILED: {NO_CAPACITY}",
        f"{A}: left; nothing of it is listed",
        f"{B}: no request yet: the head is being set up",
        f"{B}: ACCEPTED",
        f"{B}: WAITING_FOR_RESOURCES",
        f"{B}: PROVISIONING",
    ]
    assert not [call for call in cloud.calls(C) if " list " not in call]
    assert B in (cloud.folder / "launch/run-200m.head.sh").read_text()


def test_without_capacity_anywhere_nothing_is_left(cloud):
    """A refusal, a wait that is too long, and a deletion that has to be repeated."""
    (cloud.folder / f"{A}.refuses").touch()
    cloud.says(B, "WAITING_FOR_RESOURCES")
    (cloud.folder / f"{C}.slow").touch()
    with pytest.raises(InputError, match="no zone gave the chips, and nothing is left") as refused:
        cloud.run(patience=0.0)
    for text in (f"{A}: refused", f"{B}: WAITING", f"{C}: WAITING", "--capacity flex-start"):
        assert text in str(refused.value)
    assert cloud.rented() == set()
    assert any("deleting again" in line for line in cloud.lines)


@pytest.mark.parametrize("when", ["no request yet", "WAITING", "FAILED", "left; nothing"])
def test_an_interrupt_leaves_nothing_rented(cloud, when):
    """Whenever Ctrl-C comes, also while a zone is being left."""

    def tell(line):
        cloud.lines.append(line)
        if line.startswith(f"{A}: {when}"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cloud.run(tell=tell)
    assert cloud.rented() == set()


def test_a_closed_terminal_ends_no_deletion(cloud):
    """One that has to be repeated, while nothing can be printed."""
    cloud.says(A, "WAITING_FOR_RESOURCES")
    (cloud.folder / f"{A}.slow").touch()

    def tell(line):
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError):
        cloud.run(tell=tell)
    assert cloud.rented() == set()


def test_an_interrupt_while_it_deletes_lets_it_delete(cloud, monkeypatch):
    """Once; the second ends it, with the commands that end the rest."""
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) <= interrupts:
            raise KeyboardInterrupt

    monkeypatch.setattr(zones.time, "sleep", sleep)
    cloud.says(A, "FAILED", message=NO_CAPACITY)
    interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        cloud.run()
    assert cloud.rented() == set()
    assert cloud.lines[-2:] == [
        f"{A}: what it has is deleted first",
        f"{A}: left; nothing of it is listed",
    ]
    pauses.clear()
    interrupts = 2
    with pytest.raises(KeyboardInterrupt):
        cloud.run()
    assert "may still have machines; this ends them: gcloud" in cloud.lines[-1]


@pytest.mark.parametrize("there", ["head", "request"])
def test_an_earlier_launch_of_the_name_is_not_touched(cloud, there):
    """It is found before anything is made, in a later zone too."""
    (cloud.folder / f"{C}.{there}").touch()
    with pytest.raises(InputError, match=f"an earlier launch of this name is there .*{C}"):
        cloud.run()
    assert cloud.rented() == {f"{C}.{there}"}
    assert not cloud.calls("create")


@pytest.mark.parametrize("text", ["", "ERROR: NOT_FOUND", "[]", "{}", '{"state": null}', "null"])
def test_what_is_no_description_has_no_words(text):
    """Such as that of a request that is not there yet."""
    assert words(text) == Words()


@pytest.mark.parametrize(
    ("given", "create"),
    [
        ({}, "gcloud compute tpus queued-resources create run-200m"),
        ({"spot": True}, "--spot"),
        ({"capacity": "reserved"}, "--reserved"),
        ({"capacity": "flex-start"}, "gcloud alpha compute tpus queued-resources create run-200m"),
        ({"capacity": "flex-start"}, "--provisioning-model=flex-start --max-run-duration=7d"),
    ],
)
def test_each_queue_is_asked_for_by_its_own_flags(given, create):
    """In the head's script, and where a lost slice is requested again."""
    made = BACK_ENDS["queued"](job(**given))
    assert create in made.files["run-200m.head.sh"]
    assert create in made.after[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on", "queued", "--zone", A, "--zones", B], "give --zone or --zones"),
        (["--on", "queued", "--spot", "--capacity", "reserved"], "give --spot or --capacity"),
        (["--on", "sky", "--zones", f"{A},{B}"], "use --on queued"),
        (["--on", "gcloud", "--capacity", "flex-start"], "use --on queued"),
    ],
)
def test_flags_that_contradict_are_refused(flags, message):
    """Before anything is listed or made."""
    given = options.parser("launch").parse_args(flags)
    with pytest.raises(UsageError, match=message):
        launch._check_queue(given)
