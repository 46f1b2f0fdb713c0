"""The pages of a store as they are now: of runs, of trainings' curves, and what the store holds.

The paths are those of the store, so that the links in its pages lead where they do in its files:

    reports/index.html, reports/RUN.html    as the pages of runs that are written there
    STEP-KEY/                               the curves of a training, or the names of its files
    compare.html?run=STEP-KEY&run=...       several of these
    spending.html                           hours and dollars by experiment
    other files of outputs and reports      as they are
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from pipeline import InputError
from pipeline.cli.spending import cells
from pipeline.execute.run_record import DONE, StepRecord
from pipeline.execute.spending import ledger
from pipeline.pages.board import MOST_RUNS, Board, Recent
from pipeline.pages.server import HTML, TEXT, Answer, Query
from pipeline.store import append, storage
from pipeline.store.manifest import KEEP, Manifest, load
from pipeline.store.outputs import is_output_name
from pipeline.store.shards import ATTEMPTS
from steps.checkpoints.find import is_run
from training.metrics.metrics_log import NAME, Entry, parse

_KINDS = {
    ".html": HTML,
    **dict.fromkeys((".txt", ".jsonl", ".json", ".csv", ".md"), TEXT),
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_MOST_BYTES = 32 << 20
_MOST_LOGS, _MOST_PAGES, _MOST_COMPARED = 12, 12, 8
_RUNS_BESIDE, _MOST_BESIDE = 20, 6
_LINKS = (("Spending", "/spending.html"),)
_SHARE = 10  # a page is made again after so many times the time it takes


class LivePages:
    """What `Server` asks for."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.board = prefix, Board(prefix, self._has_curves, _LINKS)
        self._logs: Recent[_Log] = Recent(_MOST_LOGS)
        # What a page shows, the page, and until when (monotonic seconds) it is not made again.
        self._made: Recent[tuple[Any, str, float]] = Recent(_MOST_PAGES)
        self._begun: set[str] = set()  # logs of metrics that were there
        self.pages: dict[str, Callable[[Query], str | None]] = {
            "reports/index.html": lambda query: self.board.index(_number(query)),
            "compare.html": lambda query: self._curves(query.get("run", [])),
            "spending.html": lambda _: self._spending(),
        }

    def __call__(self, path: str, query: Query) -> Answer | None:
        folder, _, name = path.rpartition("/")
        run = name.removesuffix(".html") if folder == "reports" and name.endswith(".html") else ""
        if path in ("", "reports/"):
            return Answer(b"", TEXT, status=HTTPStatus.FOUND, location="/reports/index.html")
        with self.board.lock:
            if path in self.pages:
                page = self.pages[path](query)
            elif run:
                page = self.board.run(run)
            elif is_output_name(folder) and not name:
                page = self._curves([folder])
            else:
                page = None
        if page is not None:
            return Answer(page.encode(errors="replace"), ours=True)
        return self._stored(path)

    def _stored(self, path: str) -> Answer | None:
        """A file of an output or a report; of a directory the names, of a log all that it has.

        Nothing else of a store is shown: it may hold a cluster's secret.
        """
        top, kind = path.partition("/")[0], _KINDS.get(posixpath.splitext(path)[1])
        url = storage.join(self.prefix, path.removesuffix("/"))
        if not (top == "reports" or is_output_name(top)) or not self._inside(url):
            return None
        if path.endswith("/"):
            names = "".join(f"{name}\n" for name in storage.list_names(url))
            return Answer(names.encode(), TEXT) if names else None
        parts = append.objects(url) if kind else []
        size = sum(size for _, size in parts)
        if kind is None or not storage.exists(url):
            return None
        if size > _MOST_BYTES:
            raise InputError(
                f"{url} has {size:,} bytes, of which this server reads {_MOST_BYTES:,}"
            )
        whole = [name for name, _ in parts] == [url]
        return Answer(storage.read_bytes(url) if whole else append.Tail(url).more(), kind)

    def _inside(self, url: str) -> bool:
        """Whether a file is in the store also where a name in its path is a link."""
        if not storage.is_local(url):
            return True
        real, home = os.path.realpath(storage.local_path(url)), os.path.realpath(self.prefix)
        return real.startswith(f"{home}{os.sep}")

    def _has_curves(self, step: StepRecord, manifest: Manifest | None) -> bool:
        if manifest is not None:
            return is_run(manifest)
        attempts = [each.name for each in step.attempts if each.name]
        if not attempts or not step.directory:
            return False
        log = storage.join(self.prefix, step.directory, ATTEMPTS, attempts[-1], KEEP, NAME)
        if log not in self._begun and storage.exists(log):
            self._begun.add(log)
        return log in self._begun

    def _curves(self, names: list[str]) -> str | None:
        """The page of one training, or of several; None for an output that is no training."""
        wrong = [name for name in names if not is_output_name(name) or "/" in name]
        if wrong or not 0 < len(names) <= _MOST_COMPARED:
            raise InputError(
                f"compare.html: expected 1 to {_MOST_COMPARED} directories of this store, such as "
                f"?run=train-0123456789abcdef0123, found {', '.join(wrong) or len(names)}"
            )
        names = list(dict.fromkeys(names))
        urls = [storage.join(self.prefix, name) for name in names]
        found = [load(url) for url in urls]
        states = [m.attempt if m else self._bytes(url) for m, url in zip(found, urls, strict=True)]
        if len(urls) == 1 and not (is_run(found[0]) if found[0] else states[0]):
            return None
        beside, kept = self._beside(names), self._made.get((*names,))
        begun = time.monotonic()
        if kept is None or (kept[0] != (states, beside) and begun >= kept[2]):
            labels = [
                m.label if m else n.rpartition("-")[0] for m, n in zip(found, names, strict=True)
            ]
            if len({*labels}) < len(labels):
                labels = [f"{label} {n[-20:-12]}" for label, n in zip(labels, names, strict=True)]
            from steps.pages.compare import record_of, render

            pairs = zip(urls, labels, strict=True)
            records = [record_of(url, label, self._entries) for url, label in pairs]
            text = render(records, [("All runs", "/reports/index.html")], beside)
            until = begun + _SHARE * (time.monotonic() - begun)
            kept = (states, beside), text, until
        return self._made.keep((*names,), kept)[1]

    def _spending(self) -> str:
        """Of the newest runs, as many as the board keeps."""
        from steps.pages import page

        ids = self.board.ids()
        records = self.board.records(ids[:MOST_RUNS])
        found = []
        for each in ledger(records):
            rows = [["step", "hardware", "attempts", "hours", "dollars"]]
            rows += [[row["step"], *cells(row)] for row in each["steps"]]
            priced = [row for row in each["steps"] if row["dollars"] is not None]
            dollars = f", ${each['dollars']:,.2f}" if priced else ""
            if priced and len(priced) < len(each["steps"]):
                dollars += " and what has no price"
            total = f"{each['experiment']}: {each['hours']:.3f} h{dollars}"
            found.append((total, rows))
        return page.render("spending", experiments=found, runs=len(records), total=len(ids))

    def _beside(self, names: list[str]) -> list[tuple[str, str]]:
        """(text, link) of comparisons with the same step of the newest other runs."""
        step, links = names[0].rpartition("-")[0], {}
        for record in self.board.records(self.board.ids()[:_RUNS_BESIDE]):
            for other in record.among(*DONE, "running"):
                if other.directory.rpartition("-")[0] == step and other.directory not in names:
                    query = urlencode({"run": [*names, other.directory]}, doseq=True)
                    text = f"{record.name} {other.directory[-20:-12]}"
                    links[text] = f"/compare.html?{query}"
        return list(links.items())[:_MOST_BESIDE]

    def _bytes(self, url: str) -> int:
        """How much the metrics logs of a training in progress have so far."""
        attempts = storage.join(url, ATTEMPTS)
        places = [storage.join(attempts, name, KEEP) for name in storage.list_names(attempts)]
        return sum(self._log(place).look() for place in places)

    def _log(self, directory: str) -> _Log:
        return self._logs.keep(directory, self._logs.get(directory) or _Log(directory))

    def _entries(self, directory: str) -> list[Entry]:
        log = self._log(directory)
        log.look()
        return log.entries


class _Log:
    """The entries of a metrics log, of which a look reads what was appended."""

    def __init__(self, directory: str) -> None:
        self._tail, self._rest = append.Tail(storage.join(directory, NAME)), b""
        self.entries: list[Entry] = []

    def look(self) -> int:
        """Read on; returns the bytes read so far."""
        *lines, self._rest = (self._rest + self._tail.more()).split(b"\n")
        self.entries += map(parse, filter(bytes.strip, lines))
        return self._tail.read


def _number(query: Query) -> int:
    text = query.get("page", ["1"])[0]
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise InputError(f"index.html: expected a page from 1, found {text[:20]!r}")
    return int(text)
