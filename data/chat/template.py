"""Renders a conversation by a Jinja chat template, and finds the text that is predicted in it.

Templates are those of `transformers`: the same environment, filters and variables, without a clock.
What is predicted is what `{% generation %}` blocks enclose. In a template without such blocks it is
what an assistant's message adds to the conversation before it with the generation prompt, up to the
last special token; that must be a continuation, or the template has no loss.

A rendered text holds marks (noncharacters of Unicode, which a message may not have) for the ends of
predicted texts, and in place of special tokens that a *message* spells out, so that only special
tokens of the template itself are found, see `data.chat.encoder`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.chat.messages import Conversation, Message
from pipeline.errors import InputError

HIDDEN, ALIAS, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_MARKS = re.compile("[\ufdd0-\ufdd3]")
_BLOCKS = re.compile(r"\{%[-+]?\s*generation\b")
_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
PROBE = (Message("user", "a"), Message("assistant", "b"))


class ChatTemplate:
    """A compiled template for a tokenizer with the special tokens `special`.

    Raises:
        InputError: the template is no Jinja, fails, or gives an assistant's message no loss.
    """

    def __init__(self, source: str, special: Sequence[str], bos: str, eos: str) -> None:
        self._named = {"bos_token": bos, "eos_token": eos}
        ordered = sorted(special, key=len, reverse=True)  # the longest first, as the library does
        self._special = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self.special = tuple(special)
        self._index = {name: index for index, name in enumerate(special)}
        self._pattern = re.compile(
            f"{HIDDEN}(?P<hidden>[0-9]+){HIDDEN}|{BEGIN}|{END}|{self._special.pattern}"
        )
        self._has_blocks = bool(_BLOCKS.search(source))
        try:
            self._template = _environment().from_string(source, {"raise_exception": _raise})
            whole = re.sub(f"[{BEGIN}{END}]", "", self.render(PROBE))
            if not whole.startswith(self.prompt(PROBE[:-1])):
                raise ValueError(
                    "its generation prompt is not how it begins an assistant's message, so a "
                    "model would be asked another text than it was trained on"
                )
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"template: line {error.lineno}: {error.message}; correct the template"
            ) from error
        except ValueError as error:
            raise InputError(f"template: {error}; take another template") from error

    def render(self, messages: Conversation) -> str:
        """The text of a conversation with marks. Raises `ValueError` with what is wrong with it."""
        hidden = self._hidden(messages)
        text = self._render(hidden)
        if not self._has_blocks:
            text = self._mark_by_prefixes(hidden, text)
        if not re.search(f"{BEGIN}[^{END}]", text):
            raise ValueError("it has no loss: nothing of an assistant's message is predicted")
        return text

    def prompt(self, messages: Conversation) -> str:
        """The text before the assistant's next message, with the same marks."""
        return self._render(self._hidden(messages), add_generation_prompt=True)

    def _hidden(self, messages: Conversation) -> list[Message]:
        """The messages with marks in place of the special tokens that they spell out."""

        def hide(content: str) -> str:
            if found := _MARKS.search(content):
                raise ValueError(f"a message has the noncharacter U+{ord(found[0]):04X}")
            return self._special.sub(lambda m: f"{HIDDEN}{self._index[m[0]]}{HIDDEN}", content)

        return [Message(role, hide(content)) for role, content in messages]

    def _render(self, messages: Conversation, *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=[message._asdict() for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._named,
            )
        except jinja2.UndefinedError as error:
            raise ValueError(
                f"{error}; a template has messages of role and content, add_generation_prompt, "
                "bos_token and eos_token, and no clock"
            ) from error
        except (jinja2.TemplateError, *_ERRORS) as error:
            raise ValueError(f"the template refuses it: {error}") from error

    def _mark_by_prefixes(self, messages: list[Message], text: str) -> str:
        """The text with marks around what each assistant's message adds."""
        parts, at = [], 0
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            upto = self._render(messages[: index + 1])
            if not upto.startswith(before) or not text.startswith(upto) or len(before) < at:
                raise ValueError(
                    "it has no loss: a conversation does not begin with its first messages as the "
                    "template renders them alone; add {% generation %} blocks around what the "
                    "assistant writes"
                )
            begin, end = len(before), len(upto)
            for found in self._special.finditer(upto, begin):
                end = len(upto) if upto[found.end() :].strip() else found.end()
            parts += [text[at:begin], BEGIN, text[begin:end], END]
            at = end
        return "".join([*parts, text[at:]])

    def pieces(self, text: str) -> list[tuple[str, int | None]]:
        """A rendered text as (text, None), (mark, None) and (special token, its index)."""
        found: list[tuple[str, int | None]] = []
        at = 0
        for match in self._pattern.finditer(text):
            found += [(text[at : match.start()], None)] if match.start() > at else []
            if hidden := match["hidden"]:
                found.append((self.special[int(hidden)], None))
            else:
                found.append((match[0], self._index.get(match[0])))
            at = match.end()
        return [*found, (text[at:], None)]


class _Generation(Extension):
    """The block `{% generation %}` of `transformers`: its text, between marks."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
