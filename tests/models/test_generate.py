"""Completion against a brute-force loop, and what it compiles."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from models.generate import generate
from models.transformer import Transformer
from pipeline.errors import InputError
from tests.models import reference, small


def greedy(model, prompt, count, eos_id=None):
    """Argmax of the NumPy model, one token at a time, without padding."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference.logits(model, np.array([tokens]))[0, -1].argmax()))
        if tokens[-1] == eos_id:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", [[7], [3, 1, 4, 1, 5], [60, 0] * 5])
def test_greedy_equals_brute_force(prompt):
    """At temperature 0 the completion is the argmax of every step; padding plays no part."""
    model = small.model()
    got = generate(model, prompt, new_tokens=6, window=16)
    assert got == greedy(model, prompt, 6)


def test_the_end_token_ends_it():
    """The completion stops after the first end token, which may also be in the prompt."""
    model = small.model()
    free = greedy(model, [3, 1, 4], 8)
    eos_id = free[2]
    want = free[: free.index(eos_id) + 1]
    assert generate(model, [3, 1, 4], new_tokens=8, window=16, eos_id=eos_id) == want
    ended = generate(model, [3, 1, 60], new_tokens=2, window=16, eos_id=60)
    assert ended == greedy(model, [3, 1, 60], 2, eos_id=60)


def test_one_compilation_for_all(monkeypatch):
    """Prompt, lengths, temperature and end token do not trace the model again."""
    traces = []
    hidden = Transformer.hidden

    def counted(self, tokens, **forward):
        traces.append(tokens.axes)
        return hidden(self, tokens, **forward)

    monkeypatch.setattr(Transformer, "hidden", counted)
    model, window = small.model(), 19
    for count, prompt in ((1, [1]), (5, [1, 2, 3]), (16, [4, 5, 6])):
        generate(model, prompt, new_tokens=count, window=window)
    key = jax.random.key(0)
    generate(model, [1], new_tokens=2, window=window, temperature=0.7, key=key, eos_id=3)
    # lax.while_loop traces its body once for the carry's types; anything more is a compilation.
    assert len(traces) == 1


def test_sampling_follows_the_distribution():
    """Frequencies of the first sampled token are the softmax at that temperature."""
    model, temperature, draws = small.model(vocab_size=5), 1.5, 600
    scores = reference.logits(model, np.array([[1, 2]]))[0, -1] / temperature
    want = np.exp(scores - scores.max())
    want /= want.sum()
    keys = jax.random.split(jax.random.key(0), draws)
    got = np.bincount(
        [
            generate(model, [1, 2], new_tokens=1, window=4, temperature=temperature, key=key)[0]
            for key in keys
        ],
        minlength=5,
    )
    sigma = np.sqrt(draws * want * (1 - want))
    assert (abs(got - draws * want) < 4 * sigma + 1).all()


def test_top_k_draws_from_the_likeliest():
    """With top_k every token is among the k best of its step; k = 1 is greedy."""
    model, key = small.model(), jax.random.key(3)
    hot = {"temperature": 50.0, "key": key, "window": 16}
    assert generate(model, [5], new_tokens=6, top_k=1, **hot) == greedy(model, [5], 6)
    tokens = [5]
    for token in generate(model, [5], new_tokens=10, top_k=3, **hot):
        best = reference.logits(model, np.array([tokens]))[0, -1].argsort()[-3:]
        assert token in best
        tokens.append(token)


def test_the_key_decides():
    """Same key, same text; another key, another text."""
    model = small.model()
    a, b, c = (
        generate(model, [5], new_tokens=12, window=16, temperature=5.0, key=jax.random.key(seed))
        for seed in (1, 1, 2)
    )
    assert a == b != c
    assert len(set(a)) > 3


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([], {}, "prompt is empty"),
        ([61], {}, r"\[0, 61\)"),
        ([-1], {}, r"\[0, 61\)"),
        ([1] * 10, {"new_tokens": 7}, r"\[1, 6\]"),
        ([1], {"new_tokens": 0}, "found 0"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": 1.0}, "give a key"),
        ([1], {"top_k": 62}, "top_k"),
    ],
)
def test_impossible_requests_are_refused(prompt, changes, words):
    """One line that names the argument and its bound."""
    with pytest.raises(InputError, match=words):
        generate(small.model(), prompt, **({"new_tokens": 3, "window": 16} | changes))


def test_a_window_beyond_the_learned_positions_is_refused():
    """The padded row is what must fit the context, not only the completion."""
    model = small.model(positions="learned", context=12)
    assert generate(model, [5], new_tokens=3, window=12) == greedy(model, [5], 3)
    with pytest.raises(InputError, match="at most 12 positions"):
        generate(model, [5], new_tokens=3, window=13)


@pytest.mark.parametrize("name", ["three_short_one_long", "gpt2"])
def test_greedy_equals_brute_force_for_other_shapes(name):
    """Windows, learned positions and the rest change nothing about completion."""
    model = small.model(**small.VARIANTS[name])
    assert generate(model, [3, 1, 4], new_tokens=8, window=12) == greedy(model, [3, 1, 4], 8)
