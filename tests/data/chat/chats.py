"""Random conversations, tokenizers with the tokens of a template, and templates without blocks."""

from __future__ import annotations

import json
import random
import re

from data.chat.messages import Message
from data.chat.named_templates import named_template
from data.tokenizer.text_tokenizer import TextTokenizer
from data.tokenizer.tokenizer_file import entries
from tests.data.tokenizer.published_shapes import shape, special

HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
SHAPES = {
    "alpaca": ("gpt2", ()),
    "chatml": ("qwen", ()),
    "llama3": ("llama3", HEADERS),
    "zephyr": ("llama2", ()),
}
"""A published tokenizer's shape for each of our templates, and the tokens that it lacks."""

INST = """
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' -%}
{{ message.content + eos_token }}
{%- else -%}
{{ raise_exception('only user and assistant') }}
{%- endif -%}
{%- endfor -%}"""
"""A template whose turns of the user end in what asks for a reply."""

_SNIPPETS = (
    *(
        "Hello",
        " there",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "é",
        "e\u0301",
        "日本",
        "🦙",
        "def f(x):\n    return x",
    ),
    *("<|", "|>", "<s", "{{ x }}", "{% if %}", "it's", "3.14", "</", "&amp;", '"quoted"', "\\n"),
)


def without_blocks(name: str) -> str:
    """One of our templates, without the blocks that mark what is predicted."""
    return re.sub(r"\{%- (end)?generation -%\}", "{#- -#}", named_template(name))


def with_tokens(name: str, tokens: tuple[str, ...]) -> TextTokenizer:
    """A tokenizer of a published shape, with more special tokens."""
    description = json.loads(shape(name))
    first = entries(description)
    description["added_tokens"] += [special(t, first + i) for i, t in enumerate(tokens)]
    return TextTokenizer(json.dumps(description).encode())


def tokenizer_for(template: str) -> TextTokenizer:
    """A tokenizer that has the tokens of one of our templates."""
    return with_tokens(*SHAPES[template])


def conversations(count: int, seed: int = 0, *, system: bool = True) -> list[list[Message]]:
    """Conversations of one to four exchanges of random texts."""
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choices(_SNIPPETS, k=rng.randint(1, 9))) + rng.choice(("x", "x\n", " x"))

    found = []
    for _ in range(count):
        messages = [Message("system", text())] if system and rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 4)):
            messages += [Message("user", text()), Message("assistant", text())]
        found.append(messages)
    return found


def plain(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as other libraries take them."""
    return [message._asdict() for message in messages]
