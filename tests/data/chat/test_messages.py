"""Conversations in the rows of a source."""

from __future__ import annotations

import pytest

from data.chat.messages import Exchange, Message, Messages

ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = [Message("user", "a"), Message("assistant", "b")]


@pytest.mark.parametrize(
    ("columns", "row", "wanted"),
    [
        (Messages(), {"messages": [ASKED, ANSWERED], "id": 1}, CHAT),
        (Messages("chat"), {"chat": [{**ASKED, "name": None}, ANSWERED]}, CHAT),
        (
            Messages("conversations"),
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            CHAT,
        ),
        (Exchange(), {"instruction": "a", "output": "b"}, CHAT),
        (Exchange("q", "a", input="i"), {"q": "a", "i": "", "a": "b"}, CHAT),
        (
            Exchange("q", "a", input="i", system="s"),
            {"q": "a", "i": "more", "a": "b", "s": "c"},
            [Message("system", "c"), Message("user", "a\n\nmore"), CHAT[1]],
        ),
        (Exchange(system="s"), {"instruction": "a", "output": "b", "s": None}, CHAT),
    ],
)
def test_rows(columns, row, wanted):
    """Messages, the names of ShareGPT, and columns of one exchange."""
    assert columns.read(row) == wanted


@pytest.mark.parametrize(
    ("columns", "row", "words"),
    [
        (Messages(), {}, "expected a list of messages in 'messages', found None"),
        (Messages(), {"messages": []}, "expected a list of messages in 'messages', found []"),
        (Messages(), {"messages": "hi"}, "found 'hi'"),
        (Messages(), {"messages": ["hi"]}, "message 0: expected role and content, found 'hi'"),
        (Messages(), {"messages": [ASKED]}, "found none of assistant among 1"),
        (Messages(), {"messages": [ANSWERED, ANSWERED]}, "found none of user among 2"),
        (
            Messages(),
            {"messages": [ASKED, {"role": "robot", "content": "b"}]},
            "message 1: expected one of the roles system, user, assistant, human, gpt, found 'rob",
        ),
        (Messages(), {"messages": [{"content": "b"}]}, "found None"),
        (
            Messages(),
            {"messages": [ASKED, {"role": "assistant", "content": " \n"}]},
            "message 1 (assistant): expected a text, found ' \\n'",
        ),
        (
            Messages(),
            {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [1]}]},
            "message 1 (assistant): expected a text, found None",
        ),
        (Exchange(), {"instruction": "a", "output": None}, "(assistant): expected a text, found"),
        (Exchange(), {"instruction": "", "output": "b"}, "(user): expected a text, found ''"),
    ],
)
def test_rows_that_are_no_conversation(columns, row, words):
    """In a line that says which message."""
    with pytest.raises(ValueError, match=r"expected") as caught:
        columns.read(row)
    assert words in str(caught.value)
