"""The harness's own evaluation of our model against ours, on the same questions; needs lm_eval."""

from __future__ import annotations

import functools
import importlib.util
import json

import jax
import numpy as np
import pytest

from data.tokenizer.text_tokenizer import TextTokenizer
from data.tokenizer.text_tokenizer import train as train_tokenizer
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from pipeline.errors import InputError
from tests.models import reference
from training.config import TrainConfig
from training.evaluate.lm_eval_adapter import _answer_length, adapter, run_tasks
from training.evaluate.loglikelihood import Likelihood, accuracy, answer, text_question
from training.sharding.layout import make_layout
from training.step.train_step import Boundaries

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the optional extra lm-eval is missing"
)

LONGEST = 48
WORDS = ("the", "cat", "sat", "on", "mats", "while", "dogs", "ran", "over", "green", "hills")


def text(rng, count):
    return " ".join(rng.choice(WORDS, count))


def items(count=40):
    """Questions of two to four choices of one to eight words."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        choices = [text(rng, rng.integers(1, 9)) for _ in range(4)]
        gold = int(rng.integers(0, 4))
        found.append({"context": text(rng, rng.integers(1, 6)), "choices": choices, "gold": gold})
    found[0]["context"] = ""
    found[1]["choices"][2] = "é ü 漢字"
    return found


@functools.cache
def parts():
    """(tokenizer, model, likelihood): random weights, sharper than a fresh model's."""
    rng = np.random.default_rng(1)
    tokenizer = TextTokenizer(train_tokenizer([[text(rng, 40) for _ in range(50)]], 290))
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        embed=32,
        heads=4,
        kv_heads=2,
        head_size=8,
        mlp=64,
    )
    train = TrainConfig(steps=1, batch_size=8, sequence_length=LONGEST, compute_dtype="float32")
    layout = make_layout(jax.devices()[:1])
    boundaries = Boundaries(eos_id=tokenizer.eos_id)
    model = jax.tree.map(lambda x: x * 3, Transformer.init(config, key=jax.random.key(0)))
    return tokenizer, model, Likelihood(config, train, layout, boundaries, batch_size=8)


def lm():
    tokenizer, model, likelihood = parts()
    return adapter(model, likelihood, tokenizer, LONGEST)


class Request:
    """What the harness hands over, as far as an LM may look."""

    def __init__(self, *args):
        self.args = args


@needs_harness
def test_a_task_with_local_data_scores_as_ours(tmp_path):
    """acc, acc_norm and acc_bytes of the harness are ours on the same forty questions."""
    tokenizer, model, likelihood = parts()
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()))
    task = {
        "task": "local_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": " ",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm", "acc_bytes")
        ],
    }
    theirs = run_tasks(lm(), [task], bootstrap_iters=0)["local_choices"]
    questions = [
        text_question(tokenizer, item["context"], item["choices"], item["gold"]) for item in items()
    ]
    ours = accuracy(questions, answer(likelihood, model, questions))
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert theirs[name] == pytest.approx(ours[name], abs=1e-9)
    assert 0 < ours["acc"] < 1
    assert len({ours["acc"], ours["acc_norm"]}) == 2, "the items tell the accuracies apart"


@needs_harness
def test_rolling_log_likelihood_is_that_of_the_whole_text():
    """A text of several rows: every token once, each window's own context, by the reference."""
    tokenizer, model, _ = parts()
    words = text(np.random.default_rng(2), 90)
    ids = tokenizer.encode_batch([words])[0].tolist()
    assert len(ids) > 2 * LONGEST
    most, total = LONGEST - 1, 0.0
    row = [tokenizer.eos_id, *ids]
    first = reference.nll(model, np.array([row[: most + 1]]))[0][0]
    total -= first.sum()
    done = most
    while done < len(ids):
        count = min(most, len(ids) - done)
        end = done + count
        window = row[end - most : end + 1]
        total -= reference.nll(model, np.array([window]))[0][0][-count:].sum()
        done = end
    (got,) = lm().loglikelihood_rolling([Request(words)])
    assert got == pytest.approx(total, rel=1e-5)


@needs_harness
def test_generation_is_greedy_and_stops():
    """What is written is the reference's likeliest continuation, cut before the first stop."""
    tokenizer, model, _ = parts()
    ids = [tokenizer.eos_id, *tokenizer.encode_batch(["the cat"])[0].tolist()]
    prompt = len(ids)
    for _ in range(6):
        ids.append(int(reference.logits(model, np.array([ids]))[0, -1].argmax()))
    want = tokenizer.decode(ids[prompt:])
    settings = {"until": [], "max_gen_toks": 6}
    (written,) = lm().generate_until([Request("the cat", settings)])
    assert written == want
    (cut,) = lm().generate_until([Request("the cat", {**settings, "until": [want[2]]})])
    assert cut == want[: want.find(want[2])]


@needs_harness
def test_prompts_answered_together_are_answered_as_alone():
    """Forty prompts of many lengths, three lengths of answers, in the order of the requests."""
    rng = np.random.default_rng(5)
    requests = [
        Request(text(rng, rng.integers(1, 30)), {"until": [], "max_gen_toks": int(most)})
        for most in rng.choice([2, 3, 5], 40)
    ]
    alone = [lm().generate_until([request])[0] for request in requests[::8]]
    assert lm().generate_until(requests)[::8] == alone


SETTINGS = (
    *({}, {"max_gen_toks": 7}, {"max_new_tokens": 5}, {"max_tokens": 300}),
    *({"max_completion_tokens": 9}, {"max_tokens": 3, "max_gen_toks": 4}, {"max_gen_toks": None}),
    *({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}, {"temperature": None}),
)


def test_the_length_of_an_answer_is_that_of_the_harness():
    """256 where a task says nothing, by any of the four names; more than fits is refused."""
    want = [256, 7, 5, 300, 9, 4, 256, 256, 256, 256]
    assert [_answer_length(settings, 1024) for settings in SETTINGS] == want
    for settings in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(InputError, match="greedy"):
            _answer_length(settings, 1024)
    for settings, longest in (({}, 256), ({"max_gen_toks": 500}, 128), ({"max_gen_toks": 0}, 9)):
        with pytest.raises(InputError, match=f"1 to {longest - 1} tokens"):
            _answer_length(settings, longest)


@needs_harness
def test_the_harness_reads_the_same_lengths():
    from lm_eval.models.utils import normalize_gen_kwargs

    for settings in SETTINGS[:-1]:  # it has no answer to a temperature of None
        assert _answer_length(settings, 1024) == normalize_gen_kwargs(settings)["max_gen_toks"]
