"""The tokenizer of bytes, compared with Python's own UTF-8."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer.byte_vocabulary import byte_tokenizer_json
from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer

BYTES = TextTokenizer(byte_tokenizer_json())


@pytest.mark.parametrize("backend", ["tokenizers", "fastokens"])
@given(st.text())
def test_ids_are_the_bytes_of_the_text(backend, text):
    """Of any text, whatever encodes it, and they decode to the text."""
    text += f"\x00\x7f\u07ff\U0001f600{EOS}"
    ((ids, _),) = BYTES.encode_documents([pa.array([text])], BYTES.checked(backend))
    assert bytes(ids.tolist()) == text.encode()
    assert BYTES.decode(ids) == text


def test_a_token_is_a_byte_and_eos_is_none():
    """So bits per token are bits per byte."""
    assert (BYTES.vocab_size, BYTES.eos_id) == (257, 256)
    assert BYTES.token_bytes.tolist() == [1] * 256 + [0]
    assert BYTES.decode([0xFF, 256]) == "\N{REPLACEMENT CHARACTER}" + EOS
