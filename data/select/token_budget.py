"""The token budget of each split. Imports no heavy library, since `plan` imports it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.errors import InputError

TRAIN = "train"
ALL_THAT_IS_LEFT = -1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The number of tokens of each split.

    Attributes:
        train: tokens of train; -1 takes all that the other splits leave.
        splits: (name, tokens) of the other splits; their order determines their hash ranges. A
            budget of 0 is a split without documents.
    """

    train: int
    splits: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.train < 1 and self.train != ALL_THAT_IS_LEFT:
            raise InputError(f"tokens={self.train}: expected at least 1, or -1 for all there is")
        if not isinstance(self.splits, tuple | list) or any(
            not isinstance(split, tuple | list) or len(split) != 2 for split in self.splits
        ):
            raise InputError(
                f"splits={self.splits!r}: expected pairs of a name and a number of tokens, whose "
                'order decides where each split lies, such as (("validation", 10_000_000),)'
            )
        names = [name for name, _ in self.splits]
        for name, tokens in self.splits:
            if not _NAME.fullmatch(name) or name == TRAIN or names.count(name) > 1:
                raise InputError(
                    f"splits: {name!r}: expected names of letters, digits, '_' and '-', each once "
                    f"and none of them {TRAIN!r}; rename it"
                )
            if tokens < 0:
                raise InputError(
                    f"splits: {name}={tokens} tokens: expected 0 or more; leave it out, or use 0 "
                    "for no such split"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Train and the held-out splits that get documents, in order."""
        return (TRAIN, *(name for name, tokens in self.splits if tokens))

    def asked(self, name: str) -> int:
        """Tokens of a split, -1 for all that the others leave."""
        return self.train if name == TRAIN else dict(self.splits)[name]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {tokens:,}" for name, tokens in ((TRAIN, self.train), *self.splits)
        )
