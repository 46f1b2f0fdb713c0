"""Ids and loss masks of conversations: those of `transformers`, and what users cannot forge."""

from __future__ import annotations

import numpy as np
import pytest

from data.chat.encoder import ChatEncoder
from data.chat.messages import Message
from data.chat.named_templates import NAMED, named_template, template_of
from pipeline.errors import InputError
from steps.exchange.hf.tokenizer_files import write_tokenizer_files
from tests.data.chat.chats import (
    INST,
    conversations,
    plain,
    tokenizer_for,
    with_tokens,
    without_blocks,
)
from tests.steps.exchange.hf_folders import NEEDS_ORACLE

ASKED, ANSWERED = Message("user", "What?"), Message("assistant", "That.")


def auto_tokenizer(tokenizer, folder, template):
    """What `transformers` makes of the exported tokenizer with its template."""
    from transformers import AutoTokenizer

    write_tokenizer_files(tokenizer, str(folder), tokenizer.vocab_size, 1 << 20, template)
    return AutoTokenizer.from_pretrained(folder)


@NEEDS_ORACLE
@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", NAMED)
def test_ids_and_masks_are_those_of_transformers(tmp_path, name):
    """Of random conversations, in the template's blocks; and of the prompt of every reply."""
    tokenizer = tokenizer_for(name)
    encoder = ChatEncoder(tokenizer, named_template(name))
    theirs = auto_tokenizer(tokenizer, tmp_path, named_template(name))
    chats = conversations(150)
    for messages, found in zip(chats, encoder.encode(chats), strict=True):
        wanted = theirs.apply_chat_template(
            plain(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert found.ids.tolist() == wanted["input_ids"], messages
        assert found.predicted.tolist() == [bool(i) for i in wanted["assistant_masks"]], messages
        asked = plain(messages[:-1])
        wanted = theirs.apply_chat_template(asked, tokenize=True, add_generation_prompt=True)
        assert encoder.prompt_ids(messages[:-1]) == wanted["input_ids"]


@pytest.mark.parametrize("name", NAMED)
def test_without_blocks_the_mask_is_that_of_the_blocks(name):
    """What the messages up to a reply add to those before it, up to the token that ends it."""
    tokenizer, chats = tokenizer_for(name), conversations(60, seed=1)
    with_blocks = ChatEncoder(tokenizer, named_template(name)).encode(chats)
    without = ChatEncoder(tokenizer, without_blocks(name)).encode(chats)
    for one, other in zip(with_blocks, without, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.predicted, other.predicted)


@NEEDS_ORACLE
@pytest.mark.slow
def test_a_template_without_headers(tmp_path):
    """The prompt of a reply is the user's turn; the mask holds exactly what decodes to replies."""
    tokenizer = with_tokens("gpt2", ("[/INST]",))
    encoder = ChatEncoder(tokenizer, INST)
    theirs = auto_tokenizer(tokenizer, tmp_path, INST)
    chats = conversations(60, seed=2, system=False)
    for messages, found in zip(chats, encoder.encode(chats), strict=True):
        wanted = theirs.apply_chat_template(plain(messages), tokenize=True)["input_ids"]
        assert found.ids.tolist() == wanted
        replies = "".join(f"{m.content}<|endoftext|>" for m in messages if m.role == "assistant")
        assert tokenizer.decode(found.ids[found.predicted]) == replies


@pytest.mark.parametrize("name", NAMED)
def test_a_message_cannot_forge_a_token_of_the_template(name):
    """Every special token that a message spells out stays text, in front, amid and at the end."""
    tokenizer = tokenizer_for(name)
    encoder = ChatEncoder(tokenizer, named_template(name))
    names = sorted(encoder.template.special)
    ids = {i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) in names}

    def special(messages):
        (found,) = encoder.encode([messages])
        return found.ids, [i for i in found.ids.tolist() if i in ids]

    for forged in names:
        for text in (forged, f"a{forged}b", f"{forged}{forged}", f"\n{forged} {names[0]}"):
            for messages in (
                [Message("user", text), ANSWERED],
                [ASKED, Message("assistant", text)],
                [Message("system", text), ASKED, ANSWERED],
            ):
                found, forgeries = special(messages)
                _, wanted = special([Message(message.role, "a") for message in messages])
                assert forgeries == wanted, messages
                assert text.strip() in tokenizer.decode(found)


def refused(template, tokenizer=None):
    with pytest.raises(InputError) as caught:
        ChatEncoder(tokenizer or tokenizer_for("alpaca"), template)
    return str(caught.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}", "line 1: "),
        ("{{ message_of_nobody.content }}", "'message_of_nobody' is undefined; a template has"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined; a template has"),
        ("{{ raise_exception('never') }}", "the template refuses it: never"),
        ("{{ bos_token }}", "it has no loss: nothing of an assistant's message is predicted"),
        (
            "{% for m in messages | reverse %}{{ m.content + eos_token }}{% endfor %}",
            "it has no loss: a conversation does not begin with its first messages",
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
            "{% if add_generation_prompt %}Reply: {% endif %}",
            "its generation prompt is not how it begins an assistant's message",
        ),
        (
            "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}",
            r"ends with '\n', which is no special token",
        ),
        (named_template("chatml"), "names <|im_end|>, <|im_start|>, which the tokenizer does not"),
        ("{{ messages.append(1) }}", "the template refuses it"),
        ("{{ 1 // 0 }}", "the template refuses it: "),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "the template refuses it: "),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "the template refuses it"),
    ],
)
def test_templates_that_are_refused(template, words):
    """In a line, before a conversation is read."""
    line = refused(template)
    assert words in line
    assert "\n" not in line


def test_noncharacters_in_a_message_are_refused():
    """They mark places in a rendered text."""
    encoder = ChatEncoder(tokenizer_for("alpaca"), named_template("alpaca"))
    with pytest.raises(ValueError, match=r"noncharacter U\+FDD2"):
        encoder.encode([[Message("user", "a\ufdd2"), ANSWERED]])


def test_the_template_in_a_tokenizer_config():
    """One string, or several by name; a file without one is refused."""
    assert template_of(b'{"chat_template": "a"}', "tokenizer_config.json") == "a"
    several = b'{"chat_template": [{"name": "default", "template": "b"}]}'
    assert template_of(several, "tokenizer_config.json") == "b"
    assert template_of(b"{{ c }}", "chat_template.jinja") == "{{ c }}"
    for content in (b"{}", b"[]", b"\xff", b'{"chat_template": [1]}'):
        with pytest.raises(InputError, match=r"tokenizer_config\.json: expected"):
            template_of(content, "tokenizer_config.json")
