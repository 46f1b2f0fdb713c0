"""Text that looks like a secret: configurations and command lines are recorded in the store."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeline.errors import UsageError

_NAMES = {"token", "key", "password", "passwd", "secret", "credential", "credentials", "apikey"}
_NUMBERS = {"count", "scale", "size"}
SECRET = re.compile(
    r"""
    \b(?: hf_\w{16,} | sk-[\w-]{16,} | gh[a-z]_\w{16,} | github_pat_\w{16,} | AKIA[0-9A-Z]{12,}
      | xox[a-z]-[\w-]{10,} | AIza[\w-]{30,} ) | -----BEGIN
    | ://[^/@\s:]*:[^/@\s]+@ | [?&][\w-]*(?:signature|token|credential|secret|sig)[\w-]*=[^&\s]+
    """,
    re.VERBOSE | re.IGNORECASE,
)
REMEDY = "set an environment variable instead, such as HF_TOKEN or GOOGLE_APPLICATION_CREDENTIALS"


def is_secret_name(name: str) -> bool:
    words = re.split(r"[-_.]+", name.lower())
    return bool(_NAMES & set(words)) and words[-1] not in _NUMBERS


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
    return [SECRET.sub("***", word) for word in words]
