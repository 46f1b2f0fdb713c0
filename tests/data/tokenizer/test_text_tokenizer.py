"""A tokenizer is its bytes: deterministic, lossless, and EOS cannot be forged."""

import hashlib
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from data.read import python_docs
from data.tokenizer import expressions, text_tokenizer
from data.tokenizer.backends import to_compare
from data.tokenizer.expressions import EXPRESSIONS
from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import CorruptOutput, InputError
from steps.tokens.tokenizer import check_size

VOCAB = 600


def texts(count=120):
    return python_docs.documents()["text"].to_pylist()[:count]


@pytest.fixture(scope="module")
def content():
    """A tokenizer of 600 entries, trained on 120 documents in batches of 16."""
    documents = texts()
    return text_tokenizer.train((documents[i : i + 16] for i in range(0, 120, 16)), VOCAB)


@pytest.fixture(scope="module")
def trained(content):
    return TextTokenizer(content)


@pytest.mark.slow
def test_training_is_deterministic_across_processes_and_threads(content):
    """Another process, on one thread and with another hash seed, trains the same bytes."""
    code = (
        "import hashlib; from data.read.python_docs import documents;"
        "from data.tokenizer.text_tokenizer import train;"
        "d = documents()['text'].to_pylist()[:120];"
        f"print(hashlib.sha256(train([d], {VOCAB})).hexdigest())"
    )
    env = {
        "PYTHONHASHSEED": "7",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": ":".join(sys.path),
    }
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
    assert out.stdout.decode().strip() == hashlib.sha256(content).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize(
    "letters",
    [
        *("ACGT", "=", " ", "\n", "7", "字", "_", "_-|", "½1²", "Ⅳ7", " \t", "\n ", "\u3000 "),
        *("\x1c!", "\u180e.", "a\u0301", "/\n", "ab1", "\u200b", "'s", "aB"),
    ],
)
def test_a_word_of_thousands_of_letters_is_learnt_from_in_parts(name, letters):
    """All of the text is read, no word of it is longer than 1,024, and other texts are whole."""
    draw = random.Random(letters)
    word = "".join(draw.choice(letters) for _ in range(8_000))
    prose = "\n".join(python_docs.documents()["text"].to_pylist()[:20])
    texts = ["short", prose, f"{prose[:3_000]}{word}{prose[3_000:9_000]}", word]
    splitter = expressions.pre_tokenizer(name)
    found = text_tokenizer._in_pieces(splitter, texts)
    assert "".join(found) == "".join(texts)
    assert found[:2] == ["short", prose]
    words = [end - begin for part in found for _, (begin, end) in splitter.pre_tokenize_str(part)]
    assert max(words) <= 1_025  # one space more
    assert len(found) < 60


def test_special_tokens_of_ones_own():
    """They get the ids behind EOS, change no other id, and stay text in a text."""
    plain = TextTokenizer(text_tokenizer.train([texts(40)], 400))
    names = ("<|im_start|>", "<|im_end|>")
    made = TextTokenizer(text_tokenizer.train([texts(40)], 402, special_tokens=names))
    assert [made.decode([i]) for i in range(3)] == ["<|endoftext|>", *names]
    assert (made.eos_id, made.bos_id) == (0, 0)
    for text in (*texts(5), f"a{names[0]}b"):
        (one, _), (other, _) = plain.encode_batch([text]), made.encode_batch([text])
        assert other.tolist() == [i + 2 for i in one.tolist()]


@pytest.mark.parametrize(("name", "longest"), [("cl100k", 3), ("nanochat", 2), ("qwen2", 1)])
def test_an_expression_bounds_the_digits_of_an_entry(name, longest):
    """And fastokens is known to read it."""
    numbers = "123456789 " * 4_000
    made = TextTokenizer(text_tokenizer.train([[numbers, *texts(40)]], 700, name))
    entries = [made.decode([index]) for index in range(1, 700)]
    assert max(len(entry) for entry in entries if entry.isdigit()) == longest
    assert expressions.unknown_part(json.loads(made.content)) == ""


def test_more_text_than_the_library_can_count_is_refused(monkeypatch):
    """By the bytes of UTF-8; the step says how many tokens there may be, before it reads."""
    monkeypatch.setattr(text_tokenizer, "MOST_BYTES", 100_000)
    text_tokenizer.train([["é one"] * 1_000] * 14, 260)
    with pytest.raises(InputError, match=r"at most 100,000 bytes .* found 105,000"):
        text_tokenizer.train([["é one "] * 1_000] * 17, 260)
    documents = SimpleNamespace(
        result={"splits": {"train": {"bytes": 10**6, "tokens_counted": 2 * 10**5}}}
    )
    for tokens, size in ((None, "1,000,000"), (30_000, "150,000"), (10**9, "1,000,000")):
        with pytest.raises(InputError, match=rf"found {size}; pass tokens=20,000 or fewer"):
            check_size(documents, tokens)
    check_size(documents, 20_000)


def test_too_little_text_is_refused():
    """The message says what was asked and what came out."""
    with pytest.raises(InputError, match=r"vocab_size=5000: .* 2[5-9]\d entries"):
        text_tokenizer.train([["aaaa bbbb"]], 5000)
    with pytest.raises(InputError, match="vocab_size=256: expected at least 257"):
        text_tokenizer.train([texts()], 256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"added_tokens": []}, "special token"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder WordPiece"),
        ({"decoder": None}, "ByteLevel"),
        ({"model": {"type": "BPE", "vocab": {"a": 1}, "merges": [["not", "there"]]}}, "refuses"),
    ],
)
def test_an_unusable_tokenizer_is_refused(content, tmp_path, change, words):
    """No EOS, not byte-level, or nothing that the library accepts: refused, naming the file."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(content), "lossy": "model" in change, **change}))
    with pytest.raises(InputError, match=words) as error:
        TextTokenizer.load(str(path))
    assert str(path) in str(error.value)


def renamed(content: bytes, *names: str, eos_token: str | None = None) -> bytes:
    """The tokenizer with other special tokens: the first in EOS's place, the rest at the end."""
    description = json.loads(content)
    first, token = names[0], description["added_tokens"][0]
    vocabulary = description["model"]["vocab"]
    del vocabulary[EOS]
    vocabulary[first] = 0
    last = max(vocabulary.values()) + 1
    places = [0, *range(last, last + len(names) - 1)]
    description["added_tokens"] = [
        {**token, "content": name, "id": place} for name, place in zip(names, places, strict=True)
    ]
    if eos_token is not None:
        description["eos_token"] = eos_token
    return json.dumps(description).encode()


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>"])
def test_a_well_known_name_is_eos(content, name):
    """Whatever it is called, it ends documents, stands for no byte and cannot be forged."""
    made = TextTokenizer(renamed(content, "<pad>", name))
    assert made.eos_id == VOCAB == made.vocab_size - 1
    assert made.token_bytes[made.eos_id] == 0
    ids = made.encode_batch([f"a {name} b"])[0]
    assert made.eos_id not in ids
    assert made.decode(ids) == f"a {name} b"


def test_the_end_of_a_text_is_eos_rather_than_that_of_a_turn(content):
    """Tokenizers of chat models have both."""
    made = TextTokenizer(renamed(content, "<|eot_id|>", "<|end_of_text|>"))
    assert made.eos_id == VOCAB


@pytest.mark.parametrize("backend", ["tokenizers", "auto"])
def test_the_file_may_name_its_eos(content, backend):
    """Any special token; the file's bytes are the identity, and the libraries read the rest."""
    names = ("<|endoftext|>", "</s>", "<stop>")
    made = TextTokenizer(renamed(content, *names, eos_token="<stop>"))
    assert made.eos_id == VOCAB + 1
    assert made.digest != TextTokenizer(renamed(content, *names, eos_token="</s>")).digest
    texts = pa.array(["one two", "<stop>"])
    encoder = made.checked(backend)
    encoder.check(to_compare(texts))
    want = TextTokenizer(content).encode_batch(texts.to_pylist())
    assert [part.tolist() for part in encoder.encode(texts)] == [part.tolist() for part in want]


@pytest.mark.parametrize(
    ("names", "eos_token", "words"),
    [
        (("<|endoftext|>", "</s>"), None, r"<\|endoftext\|>, </s> could be .* pass eos="),
        (("<pad>", "<bos>"), None, "found <pad>, <bos>; pass eos="),
        (("</s>", "<pad>"), "<stop>", "'<stop>', which is no special token; .* </s>, <pad>"),
    ],
)
def test_an_eos_that_cannot_be_known_is_refused(content, names, eos_token, words):
    """The message names what there is to choose from."""
    with pytest.raises(InputError, match=words):
        TextTokenizer(renamed(content, *names, eos_token=eos_token))


@pytest.mark.parametrize("bad", [b"", b"<html>", b"[1]", b"{}", b"\xff"])
def test_what_is_no_tokenizer_is_refused(bad):
    """Any other file is an InputError."""
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        TextTokenizer(bad)


def test_settings_for_cutting_and_padding_are_ignored(content, trained):
    """A file that asks for truncation and padding encodes the whole text and no more."""
    description = json.loads(content)
    description["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    ids, _ = TextTokenizer(json.dumps(description).encode()).encode_batch(["one two three four"])
    assert np.array_equal(ids, trained.encode_batch(["one two three four"])[0])


def test_missing_file_is_named(tmp_path):
    """A path without a file is an InputError with the path."""
    with pytest.raises(InputError, match=r"gone\.json"):
        TextTokenizer.load(str(tmp_path / "gone.json"))


def test_loading_once_reads_once_and_only_the_right_file(content, tmp_path):
    """By digest: another file under the same name is damage, and few are kept."""
    text_tokenizer._read.cache_clear()
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    first = TextTokenizer.load_once(str(path), digest)
    path.unlink()
    assert TextTokenizer.load_once(str(path), digest) is first
    for blanks in range(1, 7):
        other = content + b" " * blanks
        path.write_bytes(other)
        with pytest.raises(CorruptOutput, match=digest[:8]):
            TextTokenizer.load_once(str(path), digest[:-8] + "elsewise")
        TextTokenizer.load_once(str(path), hashlib.sha256(other).hexdigest())
    assert text_tokenizer._read.cache_info().currsize == 4
    assert TextTokenizer.load_once(str(path), hashlib.sha256(other).hexdigest()).vocab_size == VOCAB


def test_a_lone_surrogate_is_refused(trained):
    """With where it is."""
    with pytest.raises(InputError, match=r"'\\udc80' at character 3"):
        trained.encode_batch(["fine", "abc\udc80"])
