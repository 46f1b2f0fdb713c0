"""`logs`: what the processes of a step's last attempt wrote, so far or as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.cli.context import Context, say
from pipeline.errors import InputError
from pipeline.execute.logs import Tail, processes
from pipeline.store import lease, storage
from pipeline.store.manifest import ATTEMPTS

_POLL_SECONDS = 2.0


def logs(context: Context) -> int:
    """The logs of the last attempt at a step; with --follow until no attempt runs."""
    node = context.step()
    path = context.store.path(node)
    while not (found := _newest(path)[1]) and _awaited(context, path):
        time.sleep(_POLL_SECONDS)
    if not found:
        raise InputError(f"{node.label}: no attempt was logged under {path}")
    if context.options.follow:
        follow(path, lambda: _runs(path))
        return 0
    for url in found:
        say(f"==> {url}")
        say(Tail(url).more().decode(errors="replace"))
    return 0


def _awaited(context: Context, path: str) -> bool:
    return context.options.follow and _runs(path)


def _runs(path: str) -> bool:
    """Whether an attempt is at work, as far as its heartbeats show."""
    holder = lease.holder(path)
    return holder is not None and holder.responsive


def follow(path: str, running: Callable[[], bool], seconds: float = _POLL_SECONDS) -> None:
    """Print the logs of the step in `path` as they grow, also of attempts that begin later.

    Args:
        path: the step's directory.
        running: whether more can come; asked before each look.
        seconds: between two looks.
    """
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
    """The last attempt with a log, and the URLs of its logs."""
    attempts = storage.join(path, ATTEMPTS)
    for name in reversed(storage.list_names(attempts)):
        if found := processes(storage.join(attempts, name)):
            return storage.join(attempts, name), found
    return "", []
