"""Event logs and manifests of runs that never took place, for the tests of the page."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline import events
from pipeline.execute.run_record import RunRecord
from pipeline.store import run_summary, storage
from pipeline.store.append import Tail
from pipeline.store.manifest import Manifest
from pipeline.store.shards import File, Shard

START = 1_790_000_000.0

# label, inputs, seconds
PIPELINE = (
    ("documents", (), 41.0),
    ("train_tokenizer", ("documents",), 12.5),
    ("tokenize_train", ("documents", "train_tokenizer"), 95.0),
    ("tokenize_validation", ("documents", "train_tokenizer"), 8.0),
    ("corpus_statistics", ("tokenize_train",), 3.0),
    ("train", ("tokenize_train", "tokenize_validation"), 240.0),
    ("evaluate", ("train", "tokenize_validation"), 30.0),
    ("sample", ("train", "train_tokenizer"), 6.0),
    ("export", ("train",), 4.0),
    ("report", ("train", "evaluate", "sample", "corpus_statistics"), 1.0),
)


def key(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()


def node(label: str, inputs: tuple[str, ...] = (), step: str | None = None) -> dict[str, Any]:
    return {
        "label": label,
        "key": key(label),
        "step": f"steps.{step or label}",
        "directory": f"{(step or label).split(' ')[0]}-{key(label)[:20]}",
        "inputs": {name: key(name) for name in inputs},
    }


class Log:
    """Writes an event log; `at` moves the clock."""

    def __init__(self, prefix: str, run: str, start: float = START) -> None:
        self.prefix, self.run, self.now = prefix, run, start
        self.url = storage.join(prefix, "events", f"{run}.jsonl")

    def at(self, seconds: float) -> Log:
        self.now += seconds
        return self

    def tell(self, event: str, label: str | None = None, **details: Any) -> Log:
        about = {} if label is None else {"step": label, "key": key(label)}
        line = {"time": self.now, "event": event, **about, **details}
        Path(self.url).parent.mkdir(parents=True, exist_ok=True)
        with open(self.url, "a") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def start(self, graph: list[dict[str, Any]], command: tuple[str, ...] = ()) -> Log:
        return self.tell(
            "run_started",
            run=self.run,
            command=list(command or ("experiments/run_200m.py", "--preset", "smoke")),
            store=self.prefix,
            settings={"vocabulary": 32768, "train": {"steps": 100}},
            graph=graph,
        )

    def began(self, label: str, attempt: str = "000001-aaaa") -> Log:
        directory = f"{label.split(' ')[0]}-{key(label)[:20]}"
        place = storage.join(self.prefix, directory, "attempts", attempt)
        return self.tell("started", label, attempt=attempt, log=f"{place}/log.txt")


def publish(prefix: str, label: str, inputs: tuple[str, ...], seconds: float) -> None:
    """Write a manifest as a step of `PIPELINE` would have left it."""
    entry = node(label, inputs)
    shards = tuple(
        Shard(f"part/{i}", f"attempts/a/shards/part/{i}", (File("x", 1_700_000, "0" * 64, ""),), {})
        for i in range(3)
    )
    record = Manifest(
        key=entry["key"],
        step=entry["step"],
        version=3,
        label=label,
        config={
            "fields": {"learning_rate": {"float": (0.003).hex()}},
            "defaults": {
                "source": {
                    "class": "Source",
                    "fields": {"name": "fineweb & more"},
                    "defaults": {},
                }
            },
        },
        inputs={
            n: {"key": key(n), "directory": node(n)["directory"], "digest": ""} for n in inputs
        },
        shards=shards,
        result={
            **{"tokens": 10_485_760, "loss": 3.21987654321, "splits": {"train": 99}},
            "measured": {"hardware": "h100", "seconds": {"data_wait": 75.0, "total": 240.0}},
        },
        content="",
        action="",
        build="",
        alias=None,
        sources={},
        needs=(),
        attempt="000001-aaaa",
        started=START - 86_400,
        seconds=seconds,
        provenance={
            "git": {"commit": "0123456789abcdef", "uncommitted": "ff"},
            "python": "3.11.9",
            "platform": "Linux-6.1",
            "packages": {"jax": "0.10.2"},
        },
    )
    url = storage.join(prefix, entry["directory"], "manifest.json")
    storage.write_atomic(url, record.to_bytes())


def summarise(prefix: str, run: str) -> None:
    record, log = RunRecord(run), Tail(run_summary.log_url(prefix, run)).more()
    log = log[: log.rfind(b"\n") + 1]
    for line in log.splitlines():
        record.apply(events.from_line(line))
    run_summary.save(prefix, run, run_summary.encode(record, len(log)))


def graph() -> list[dict[str, Any]]:
    return [node(label, inputs) for label, inputs, _ in PIPELINE]


def troubled_run(prefix: str, run: str = "20260921-120000-aaaaaa") -> Log:
    """Ten steps: three reused (one from elsewhere), three executed, one failed, three not reached.

    `tokenize_validation` is warned about, `train` is tried twice, `evaluate` fails.
    """
    log = Log(prefix, run).start(graph())
    for label, inputs, seconds in PIPELINE[:7]:
        if label != "evaluate":
            publish(prefix, label, inputs, seconds)
    log.tell("hit", "documents", seconds=41.0, origin=None)
    log.tell("hit", "train_tokenizer", seconds=12.5, origin="gs://team/store")
    log.tell("hit", "corpus_statistics", seconds=3.0, origin=None)
    for label in ("tokenize_train", "tokenize_validation", "train", "evaluate", "sample", "export"):
        log.tell("queued", label)
    log.tell("queued", "report")
    log.at(2).began("tokenize_train").at(1).began("tokenize_validation")
    log.at(3).tell("warning", "tokenize_validation", message="3 documents were <empty>")
    log.at(4).tell("shard", "tokenize_validation", shard="part/0", bytes=1_700_000)
    done = {"status": "published", "result": {"tokens": 1024}}
    log.tell("finished", "tokenize_validation", seconds=8.0, **done)
    log.at(85).tell("finished", "tokenize_train", seconds=95.0, **done)
    log.at(1).began("train").at(60)
    log.tell("progress", "train", done=40, total=100, unit="steps", note="loss 4.1")
    log.tell("retried", "train", cause="its worker died: SIGKILL", tries=1)
    log.at(5).began("train", "000002-bbbb").at(175)
    log.tell("finished", "train", seconds=175.0, **done)
    log.at(1).began("evaluate").at(20)
    cause = "InputError: expected <script>alert('x')</script> & more"
    place = storage.join(prefix, node("evaluate")["directory"], "attempts/000001-aaaa/log.txt")
    log.tell("failed", "evaluate", cause=cause, log=place)
    labels = ["tokenize_validation", "tokenize_train", "train"]
    return log.at(0.5).tell("run_finished", outcome="failed", executed=labels)


def clean_run(prefix: str, run: str, start: float, reused: int, count: int = 10) -> Log:
    """A run of `PIPELINE` without trouble: the first `reused` steps are hits, others executed."""
    log = Log(prefix, run, start).start(graph()[:count])
    for label, inputs, seconds in PIPELINE[:reused]:
        publish(prefix, label, inputs, seconds)
        log.tell("hit", label, seconds=seconds, origin=None)
    for label, _, _ in PIPELINE[reused:count]:
        log.tell("queued", label)
    for label, inputs, seconds in PIPELINE[reused:count]:
        publish(prefix, label, inputs, seconds)
        log.began(label).at(seconds)
        log.tell("finished", label, seconds=seconds, status="published", result={})
    labels = [label for label, _, _ in PIPELINE[reused:count]]
    return log.tell("run_finished", outcome="ok", executed=labels)


def large_run(prefix: str, run: str, count: int, workers: int = 12) -> Log:
    """A fan of `count` steps: sources, a tokenised part each, sweeps, one table."""
    sources = [f"source {i:03d}" for i in range(count * 2 // 5)]
    parts = [f"tokenize {i:03d}" for i in range(count * 2 // 5)]
    sweeps = [f"train rate {i:03d}" for i in range(count - len(sources) - len(parts) - 1)]
    entries = [node(s, (), "source") for s in sources]
    entries += [node(p, (s,), "tokenize") for p, s in zip(parts, sources, strict=True)]
    entries += [node(t, tuple(parts[i % 7 :: 41]), "train") for i, t in enumerate(sweeps)]
    entries.append(node("table", tuple(sweeps)))
    log = Log(prefix, run).start(entries)
    for label in sources:
        log.tell("hit", label, seconds=3.0, origin=None)
    for label in [*parts, *sweeps, "table"]:
        log.tell("queued", label)
    for batch in range(0, len(parts), workers):
        for label in parts[batch : batch + workers]:
            log.began(label)
        for i, label in enumerate(parts[batch : batch + workers]):
            took = 4.0 + i / 8
            log.at(took / workers).tell("finished", label, seconds=took, status="published")
    for i, label in enumerate(sweeps[: len(sweeps) // 2]):
        log.began(label).at(2 + i % 3)
        if i % 37 == 5:
            log.tell("failed", label, cause="out of memory", log="")
        else:
            log.tell("finished", label, seconds=2.0 + i % 3, status="published")
    log.began(sweeps[-1]).at(9)
    return log.tell("progress", sweeps[-1], done=1200, total=5000, unit="steps", note="loss 3.2")
