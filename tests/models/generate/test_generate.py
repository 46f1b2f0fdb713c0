"""Completion against a brute-force loop, and what it compiles."""

from __future__ import annotations

import numpy as np
import pytest

from models.generate import generate as module
from models.generate.generate import MAX_TOKENS_PER_CALL, bucket_length, generate, stream
from models.generate.sampling_config import Sampling
from pipeline.errors import InputError
from tests.models import reference, small

PROMPTS = ([7], [3, 1, 4, 1, 5], [60, 0] * 4)


def greedy(model, prompt, count, eos_id=None):
    """Argmax of the NumPy model, one token at a time, without padding or a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference.logits(model, np.array([tokens]))[0, -1].argmax()))
        if tokens[-1] == eos_id:
            break
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "three_short_one_long"])
def test_greedy_equals_brute_force(name):
    """At temperature 0 every completion is the argmax of every step; padding plays no part."""
    model = small.model(**small.VARIANTS[name])
    want = [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert generate(model, PROMPTS, new_tokens=12) == want
    assert generate(model, PROMPTS[1:2], new_tokens=1) == [want[1][:1]]


@pytest.mark.slow
def test_each_row_ends_at_its_own_end_token():
    """A completion stops after its first end token, which may also be in the prompt."""
    model = small.model()
    free = [greedy(model, prompt, 12) for prompt in PROMPTS]
    for eos_id in {row[2] for row in free}:
        want = [greedy(model, prompt, 12, eos_id) for prompt in PROMPTS]
        assert generate(model, PROMPTS, new_tokens=12, eos_id=eos_id) == want
        assert len({len(row) for row in want}) > 1
    first = greedy(model, [3, 1, 60], 1)[0]
    assert generate(model, [[3, 1, 60]], new_tokens=5, eos_id=first) == [[first]]


def hot(seed: int = 0) -> Sampling:
    return Sampling(temperature=5.0, top_k=50, top_p=0.97, seed=seed)


@pytest.mark.parametrize("tokens_per_yield", [1, 3, MAX_TOKENS_PER_CALL])
@pytest.mark.slow
def test_streaming_says_the_same(tokens_per_yield):
    """All parts together are the whole, whatever their size; no part is larger than asked for."""
    model = small.model()
    for sampling, eos_id in ((None, None), (hot(), 11), (hot(1), 5)):
        options = {"new_tokens": 14, "sampling": sampling, "eos_id": eos_id}
        whole = generate(model, PROMPTS, **options)
        joined = [[] for _ in PROMPTS]
        for parts in stream(model, PROMPTS, tokens_per_yield=tokens_per_yield, **options):
            assert 1 <= max(map(len, parts)) <= tokens_per_yield
            for row, part in zip(joined, parts, strict=True):
                row += part
        assert joined == whole


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others():
    """Not on what they say, how long they are, whether they have ended or how many follow."""
    model = small.model()
    options = {"new_tokens": 12, "sampling": hot(), "eos_id": 5}
    base = generate(model, PROMPTS, **options)
    assert generate(model, PROMPTS[:1], **options) == base[:1]
    assert generate(model, PROMPTS[:2], **options) == base[:2]
    others = generate(model, [[1] * 13, PROMPTS[1], [2]], **options)
    assert others[1] == base[1]
    assert others[0] != base[0]
    assert others[2] != base[2]


@pytest.mark.slow
def test_draws_are_among_the_likeliest_of_every_step():
    """Each token is one of the k best of what came before it; k = 1 is greedy."""
    model = small.model()
    wild = Sampling(temperature=50.0, top_k=3)
    prompt = [5]
    tokens = list(prompt)
    for token in generate(model, [prompt], new_tokens=10, sampling=wild)[0]:
        assert token in reference.logits(model, np.array([tokens]))[0, -1].argsort()[-3:]
        tokens.append(token)
    assert tokens[1:] != greedy(model, prompt, 10)
    one = Sampling(temperature=50.0, top_k=1)
    assert generate(model, [prompt], new_tokens=10, sampling=one) == [greedy(model, prompt, 10)]


@pytest.mark.slow
def test_one_compilation_for_each_bucket():
    """Prompts, lengths, temperature, top_k, top_p, seed and end token compile nothing again."""
    model = small.model(vocab_size=59)
    programs = (module._begin, module._advance)
    before = [program._cache_size() for program in programs]

    def compiled():
        return [p._cache_size() - b for p, b in zip(programs, before, strict=True)]

    for count, prompt in ((2, [1]), (5, [1, 2, 3]), (9, [4, 5, 6])):
        generate(model, [prompt, [7]], new_tokens=count)
    generate(model, [[1], [2]], new_tokens=2, sampling=hot(), eos_id=3)
    generate(model, [[1], [2]], new_tokens=2, sampling=Sampling(temperature=0.1))
    assert compiled() == [1, 1]
    generate(model, [[1], [2]], new_tokens=30)  # another cache, and the same prompts
    assert compiled() == [2, 2]
    generate(model, [[1] * 20, [2]], new_tokens=9)  # other prompts, and the same cache
    assert compiled() == [3, 2]


def test_buckets():
    """Nothing is cut, little is wasted, and learned positions are never exceeded."""
    rotary, learned = small.config(), small.config(positions="learned", context=300)
    sizes = [bucket_length(n, rotary) for n in range(1, 3000)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 11
    assert max(size / n for n, size in enumerate(sizes, start=1) if n >= 16) < 2
    assert bucket_length(300, learned) == bucket_length(257, learned) == 300


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ([], {}, "at least one prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[61]], {}, r"\[0, 61\)"),
        ([[-1]], {}, r"\[0, 61\)"),
        ([[1]], {"new_tokens": 0}, "found 0"),
        ([[1]], {"tokens_per_yield": 65}, "1 to 64"),
    ],
)
def test_impossible_requests_are_refused(prompts, changes, words):
    """One line that names the argument and its bound, at the call and not at the first token."""
    with pytest.raises(InputError, match=words):
        stream(small.model(), prompts, **({"new_tokens": 3} | changes))


@pytest.mark.slow
def test_more_than_the_learned_positions_are_refused():
    """A row may fill them and not exceed them."""
    model = small.model(positions="learned", context=12)
    assert generate(model, [[5]], new_tokens=11) == [greedy(model, [5], 11)]
    with pytest.raises(InputError, match="12 learned positions"):
        generate(model, [[5]], new_tokens=12)
    with pytest.raises(InputError, match="at most 0 tokens"):
        generate(model, [[5] * 20], new_tokens=1)
