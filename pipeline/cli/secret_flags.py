"""Refuse or mask secrets on command lines, which are recorded in the store."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.errors import UsageError
from pipeline.identity.secret_text import REMEDY, SECRET, is_secret_name


def refuse_secrets(arguments: Iterable[str]) -> None:
    """Raise `UsageError`, without the value, if a flag's name or value looks like a secret."""
    flag = ""
    for word in arguments:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            if is_secret_name(flag):
                _refuse(flag, "its name")
        if SECRET.search(word):
            _refuse(flag or "an argument", "its value")


def _refuse(flag: str, what: str) -> None:
    raise UsageError(
        f"{flag}: {what} looks like a secret, and command lines are recorded in the store; {REMEDY}"
    )


def redacted(words: Iterable[str]) -> list[str]:
    """The words of a command, with every text that looks like a secret replaced by ***."""
    return [SECRET.sub("***", word) for word in words]
