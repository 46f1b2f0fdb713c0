"""A chat model: trained on conversations, talked to, exported with its template."""

from __future__ import annotations

import dataclasses
import io
import json
import sys

import numpy as np
import pytest
from gguf import GGUFReader

import steps
import steps.cli.generate as verb
from data.chat.encoder import ChatEncoder
from data.chat.messages import Message
from data.chat.named_templates import named_template
from models.generate.generate import generate
from steps.checkpoints.find import find, open_model
from steps.tokens.chat_templates import chat_of
from tests.data.chat.chats import conversations, plain
from tests.steps.built import built
from tests.steps.exchange.hf_folders import NEEDS_ORACLE
from tests.steps.mini import MINI
from training.config import OptimizerConfig

pytestmark = pytest.mark.slow

LENGTH = 128
TOKENS = ("<|im_start|>", "<|im_end|>")
CHATS = conversations(80, seed=9)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The store and the nodes of a base model and of the chat model that began with it."""
    folder = tmp_path_factory.mktemp("chat")
    text = "".join(json.dumps({"messages": plain(m)}) + "\n" for m in CHATS)
    (folder / "chats.jsonl").write_text(text)
    documents = steps.sample(MINI.source, tokens=40_000, splits=(("validation", 4_000),))
    tokenizer = steps.train_tokenizer(documents, vocab_size=512, special_tokens=TOKENS)
    chats = steps.conversations(
        str(folder / "chats.jsonl"),
        tokenizer,
        template="chatml",
        sequence_length=LENGTH,
        splits=(("validation", 0.1),),
    )
    train = dataclasses.replace(MINI.training, steps=4, evaluate_every=4, checkpoint_every=4)
    how = OptimizerConfig(learning_rate=3e-3)
    tokens = steps.tokenize(documents, tokenizer)
    base = steps.train(steps.block_shuffle(tokens, LENGTH), MINI.model, how, train)
    warm = steps.warm_start(
        base,
        steps.block_shuffle(chats, LENGTH),
        take="model",
        optimizer=how,
        train=dataclasses.replace(train, steps=30, separate_documents=True),
    )
    return str(folder / "store"), base, warm, chats


@pytest.fixture(scope="module")
def chat_model(chain):
    store, _, warm, _ = chain
    return built(store, warm, steps.Checkpoint)


def test_it_learns_replies_and_scores_the_held_out_ones(chain, chat_model):
    """The loss falls, `evaluate` repeats the last one, and a base model is scored on chats too."""
    store, base, warm, chats = chain
    first, last = chat_model.result["first"]["loss"], chat_model.result["last"]["loss"]
    assert last < first - 0.5
    (row,) = built(store, steps.evaluate(warm), steps.Scores).rows
    (in_training,) = [r for r in chat_model.rows("evaluations") if r["step"] == 30]
    assert row["loss"] == pytest.approx(in_training["loss"], rel=1e-4)
    about = built(store, chats, steps.TokenCache).result["splits"]["validation"]
    assert row["tokens"] == about["predicted"]
    (before,) = built(store, steps.evaluate(base, chats), steps.Scores).rows
    assert before["tokens"] == row["tokens"]
    assert before["loss"] > row["loss"]


def said(capsys, monkeypatch, lines: str, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert verb.run([*arguments, "--chat", "--temperature", "0", "--new-tokens", "12"]) == 0
    return capsys.readouterr().out.splitlines()


def replies(chat_model, *asked: str, system: str | None = None) -> list[str]:
    """The replies to messages one after the other, by the functions that the verb is built on."""
    found = find(chat_model.path)
    tokenizer = found.tokenizer().load()
    encoder = ChatEncoder(tokenizer, named_template("chatml"))
    model = open_model(found.path, found.model, found.compute_dtype)
    messages = [] if system is None else [Message("system", system)]
    written = []
    for text in asked:
        messages.append(Message("user", text))
        ids = encoder.prompt_ids(messages)
        (made,) = generate(model, [ids], new_tokens=12, eos_id=encoder.end_id)
        ends = [i for i, index in enumerate(made) if index in (encoder.end_id, tokenizer.eos_id)]
        written.append(tokenizer.decode(made[: ends[0] if ends else None], after=ids))
        messages.append(Message("assistant", written[-1]))
    return written


def test_a_conversation_in_the_terminal(chat_model, capsys, monkeypatch):
    """Each line is answered after all that was said; blank lines say nothing."""
    path = chat_model.path
    wanted = "\n".join(replies(chat_model, "Hello", "And <|im_end|> you?"))
    found = said(capsys, monkeypatch, "Hello\n\nAnd <|im_end|> you?\n", path)
    assert found == wanted.splitlines()
    system = "\n".join(replies(chat_model, "Hello", system="Be brief."))
    found = said(capsys, monkeypatch, "", path, "--system", "Be brief.", "--prompt", "Hello")
    assert found == system.splitlines()


def test_a_base_model_needs_a_template(chain, capsys, monkeypatch, typed):
    """The refusal says so; with one it is talked to, whatever it says."""
    store, base, _, _ = chain
    path = built(store, base, steps.Checkpoint).path
    status, _, err = typed("generate", path, "--chat", "--prompt", "a")
    assert status == 1
    assert "pass --template NAME or FILE" in err.splitlines()[-1]
    assert said(capsys, monkeypatch, "", path, "--prompt", "a", "--template", "alpaca")


@NEEDS_ORACLE
def test_the_exported_folder_writes_conversations_alike(chain, chat_model):
    """`apply_chat_template` gives the ids of the rows; generation stops at the end of a turn."""
    from transformers import AutoTokenizer, GenerationConfig

    store, _, warm, _ = chain
    exported = steps.export_hf(warm, dtype="float32")
    folder = built(store, exported, steps.HuggingFaceModel).folder
    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer = chat_model.tokenizer().load()
    encoder = ChatEncoder(tokenizer, named_template("chatml"))
    for messages, found in zip(CHATS, encoder.encode(CHATS), strict=True):
        wanted = theirs.apply_chat_template(
            plain(messages), return_dict=True, return_assistant_tokens_mask=True
        )
        assert found.ids.tolist() == wanted["input_ids"]
        assert found.predicted.tolist() == [bool(i) for i in wanted["assistant_masks"]]
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert ends == [tokenizer.eos_id, encoder.end_id]


def test_the_template_is_in_the_gguf_file(chain, chat_model):
    """As llama.cpp reads it, with the id that ends a turn."""
    store, _, warm, _ = chain
    node = steps.export_gguf(steps.export_hf(warm, dtype="float32"), dtype="f32")
    reader = GGUFReader(built(store, node, steps.GgufModel).file)
    field = reader.get_field("tokenizer.chat_template")
    assert field is not None
    assert field.contents() == named_template("chatml")
    end = reader.get_field("tokenizer.ggml.eot_token_id")
    assert end is not None
    assert end.contents() == chat_of(chat_model).end_id
    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert np.array(tokens.contents())[end.contents()] == "<|im_end|>"
