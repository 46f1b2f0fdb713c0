"""Conversations in the rows of a source: a column of messages, or columns of one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"human": "user", "gpt": "assistant"}  # of ShareGPT


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


Conversation: TypeAlias = Sequence[Message]


@dataclass(frozen=True)
class Messages:
    """A column with the messages of a conversation, each with `role` and `content`.

    The names of ShareGPT are read too: `from` and `value`, "human" and "gpt".
    """

    column: str = "messages"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    def read(self, row: Mapping[str, Any]) -> list[Message]:
        """The conversation of a row. Raises `ValueError` with what is wrong with it."""
        found = row.get(self.column)
        if not isinstance(found, list) or not found:
            raise ValueError(f"expected a list of messages in {self.column!r}, found {found!r:.40}")
        return checked([_message(each, place) for place, each in enumerate(found)])


@dataclass(frozen=True)
class Exchange:
    """Columns with an instruction and its response; `input` and `system` may be null or empty.

    The input follows the instruction after an empty line; `system` is a message of its own.
    """

    instruction: str = "instruction"
    response: str = "output"
    input: str | None = None
    system: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        named = (self.instruction, self.response, self.input, self.system)
        return tuple(name for name in named if name is not None)

    def read(self, row: Mapping[str, Any]) -> list[Message]:
        """The conversation of a row. Raises `ValueError` with what is wrong with it."""
        system, more = (row.get(name) if name else None for name in (self.system, self.input))
        asked = row.get(self.instruction)
        if isinstance(asked, str) and isinstance(more, str) and more:
            asked = f"{asked}\n\n{more}"
        parts = (("system", system), ("user", asked), ("assistant", row.get(self.response)))
        return checked(
            [
                _message({"role": role, "content": content}, place)
                for place, (role, content) in enumerate(parts)
                if content or role != "system"
            ]
        )


Columns: TypeAlias = Exchange | Messages


def checked(messages: list[Message]) -> list[Message]:
    """The messages, of both sides. Raises `ValueError` if one side is missing."""
    roles = {message.role for message in messages}
    for role in ("user", "assistant"):
        if role not in roles:
            raise ValueError(
                f"expected messages of user and assistant, found none of {role} among "
                f"{len(messages)}"
            )
    return messages


def _message(found: Any, place: int) -> Message:
    if not isinstance(found, dict):
        raise ValueError(f"message {place}: expected role and content, found {found!r:.40}")
    role = found.get("role", found.get("from"))
    content = found.get("content", found.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ValueError(f"message {place}: expected one of the roles {known}, found {role!r:.40}")
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"message {place} ({role}): expected a text, found {content!r:.40}")
    return Message(_ROLES[role], content)
