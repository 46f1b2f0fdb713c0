"""`logs`: print the logs of a step's last attempt, once or as they grow."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.cli.context import Context, say
from pipeline.errors import InputError
from pipeline.execute.logs import processes
from pipeline.store import lease, storage
from pipeline.store.append import Tail
from pipeline.store.shards import ATTEMPTS

_POLL_SECONDS = 2.0


def logs(context: Context) -> int:
    """Print the logs of a step's last attempt; with --follow until no attempt runs."""
    node = context.step()
    path = context.store.path(node)
    while not (found := _newest(path)[1]) and context.options.follow and _runs(path):
        time.sleep(_POLL_SECONDS)
    if not found:
        raise InputError(f"{node.label}: found no log of an attempt under {path}")
    if context.options.follow:
        follow(path, lambda: _runs(path))
        return 0
    for url in found:
        say(f"==> {url}")
        say(Tail(url).more().decode(errors="replace"))
    return 0


def _runs(path: str) -> bool:
    holder = lease.holder(path)
    return holder is not None and holder.responsive


def follow(path: str, running: Callable[[], bool], seconds: float = _POLL_SECONDS) -> None:
    """Print the logs of the step in `path` as they grow, those of later attempts included."""
    tails: dict[str, Tail] = {}
    shown = ""
    while True:
        more = running()
        attempt, found = _newest(path)
        if attempt != shown:
            say(f"==> {attempt}")
            shown, tails = attempt, {}
        for url in found:
            text = tails.setdefault(url, Tail(url)).more().decode(errors="replace")
            name = url.rpartition("/")[2].removesuffix(".txt")
            prefix = f"{name} | " if len(found) > 1 else ""
            for line in text.splitlines():
                say(f"{prefix}{line}")
        if not more:
            return
        time.sleep(seconds)


def _newest(path: str) -> tuple[str, list[str]]:
    attempts = storage.join(path, ATTEMPTS)
    for name in reversed(storage.list_names(attempts)):
        if found := processes(storage.join(attempts, name)):
            return storage.join(attempts, name), found
    return "", []
