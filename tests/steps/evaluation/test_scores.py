"""Evaluating a trained model, following its training, and asking it questions: one small graph."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments.run_200m import experiment
from pipeline import InputError
from pipeline.errors import StepFailed
from pipeline.graph.step import as_node
from pipeline.plan.plan import plan
from pipeline.store import storage
from pipeline.store.outputs import Store
from steps.artifacts import Checkpoint, Scores, TokenCache, Tokenizer
from steps.documents.sample import sample
from steps.evaluation.downstream import lm_evaluation, multiple_choice, read_questions
from steps.evaluation.evaluate import Also, evaluate
from steps.evaluation.follow import follow
from steps.tokens.sequences import block_shuffle
from steps.tokens.token_cache import tokenize
from steps.tokens.tokenizer import train_tokenizer
from steps.training.train import train
from tests.pipeline.helpers import bring_up
from tests.steps.built import built as artifact

pytestmark = pytest.mark.slow

SMOKE = experiment.presets["smoke"]
LENGTH = 64
STEPS, BATCH = 12, 8
# By tokens, and with the length of the sequences: what the graph says, a follower cannot know yet.
CONFIG = dataclasses.replace(
    SMOKE.training,
    steps=0,
    batch_size=BATCH,
    evaluate_every=6,
    evaluate_batches="all",
    checkpoint_every=4,
    keep_checkpoints=9,
)
MODEL = dataclasses.replace(SMOKE.model, vocab_size=512, layers=2, embed=32, mlp=48, head_size=16)
ALSO = Also(prompts=("Return the",), new_tokens=8)


class Graph:
    """The steps under test, and what a store holds of them."""

    def __init__(self, store: str) -> None:
        self.store = store
        splits = (("validation", 6_000), ("held", 4_000), ("test", 2_000))
        documents = sample(SMOKE.source, tokens=60_000, splits=splits)
        self.tokenizer = train_tokenizer(documents, vocab_size=MODEL.vocab_size)
        self.tokens = tokenize(documents, self.tokenizer)
        sequences = block_shuffle(
            self.tokens, sequence_length=LENGTH, io_block_size=4, window_blocks=16
        )
        self.model = train(sequences, MODEL, SMOKE.optimizer, CONFIG, tokens=STEPS * BATCH * LENGTH)
        self.scores = evaluate(self.model, self.tokens, self.tokenizer, also=ALSO)
        self.followed = follow(self.model, self.tokens, self.tokenizer, also=ALSO, batch_size=16)

    def open(self, wanted, kind):
        return artifact(self.store, wanted, kind)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store in which training, evaluation and the follower have run, in this process."""
    graph = Graph(str(tmp_path_factory.mktemp("store")))
    bring_up(graph.store, graph.scores, graph.followed)
    return graph


def test_training_evaluates_every_held_out_split_but_test(built):
    """A row a split and evaluation, validation first; the result speaks of validation."""
    model = built.open(built.model, Checkpoint)
    rows = model.rows("evaluations")
    assert [(row["step"], row["split"]) for row in rows] == [
        (step, name) for step in (0, 6, 12) for name in ("validation", "held")
    ]
    assert model.result["first"] == rows[0]
    assert model.result["last"] == rows[-2]
    assert model.result["evaluations"] == rows[-2:]
    tokens = built.open(built.tokens, TokenCache)
    for row in rows:
        sequences, left = divmod(tokens.tokens(row["split"]), LENGTH)
        assert row["tokens"] == sequences * (LENGTH - 1) + max(0, left - 1)


def same(got, want):
    """Whether two rows agree: counts exactly, figures to rounding."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        close = isinstance(value, float) and not math.isnan(value)
        assert got[name] == (pytest.approx(value, rel=1e-6) if close else value), name


def test_the_follower_evaluator_and_loop_find_the_same(built):
    """Twelve steps, three checkpoints: the last one's rows are the loop's and `evaluate`'s."""
    model = built.open(built.model, Checkpoint)
    scores, followed = (built.open(n, Scores) for n in (built.scores, built.followed))
    assert [(row["step"], row["split"]) for row in followed.rows] == [
        (step, name) for step in (4, 8, 12) for name in ("validation", "held")
    ]
    assert [row["split"] for row in scores.rows] == ["validation", "held", "test"]
    lasts = zip(followed.rows[-2:], scores.rows[:2], model.rows("evaluations")[-2:], strict=True)
    for one, two, three in lasts:
        same(one, two)
        same(two, three)
    assert followed.result["loss"] == followed.rows[-2]["loss"]
    assert scores.result["loss"] == scores.rows[0]["loss"]
    assert followed.result["measured"]["skipped"] == []


def test_samples_are_generated_by_every_checkpoint(built):
    """One a checkpoint; the last one is that of `evaluate`."""
    scores, followed = (built.open(n, Scores) for n in (built.scores, built.followed))
    samples = followed.samples()
    assert [sample["step"] for sample in samples] == [4, 8, 12]
    assert {sample["prompt"] for sample in samples} == {"Return the"}
    (last,) = scores.result["samples"]
    assert samples[-1] == {"step": 12, **last}
    assert scores.samples() == samples[-1:]


def test_named_splits_and_a_part_of_them(built):
    scores = built.open(evaluate(built.model, built.tokens, splits=("test",), sequences=3), Scores)
    (row,) = scores.rows
    assert (row["split"], row["tokens"]) == ("test", 3 * (LENGTH - 1))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"splits": ("nothing",)}, "no held-out split 'nothing'; sample makes validation, held"),
        ({"splits": ("train",)}, "no held-out split 'train'"),
    ],
)
def test_what_cannot_be_scored_is_refused(built, ask, message):
    with pytest.raises(InputError, match=message):
        evaluate(built.model, built.tokens, **ask)


@pytest.fixture
def questions(tmp_path, built):
    """(URL of a file of questions about the tokenizer's own words, its digest)."""
    lines = [
        {"context": "Return the", "choices": [" value", " zebra", " xylophone"], "gold": 0},
        {"context": "", "choices": ["Return", "Qqqq"], "gold": 0},
        {"context": "This is a ", "choices": ["list", "éé"], "gold": 1},
    ]
    path = str(tmp_path / "questions.jsonl")
    data = "\n".join(json.dumps(line) for line in lines).encode()
    storage.write_atomic(path, data)
    return path, lines


def test_questions_of_a_file(built, questions):
    """Three questions: both accuracies and chance; other questions make the output stale."""
    url, lines = questions
    node = multiple_choice(built.model, built.tokenizer, questions=url, delimiter="")
    result = built.open(node, Scores).result
    assert result["items"] == 3
    assert result["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert {"acc", "acc_norm", "acc_bytes"} <= result.keys()
    storage.write_atomic(url, json.dumps(lines[0]).encode())
    (entry,) = (e for e in plan([as_node(node)], Store(built.store)) if e.node is node)
    assert entry.reason.startswith("questions changed: questions.jsonl ")


def test_questions_are_cut_where_the_context_ends(built, questions):
    """Context and choice together are the text's own ids after the end-of-document id."""
    url, lines = questions
    tokenizer = built.open(built.tokenizer, Tokenizer).load()
    for question, line in zip(read_questions(url, tokenizer, ""), lines, strict=True):
        assert question.gold == line["gold"]
        assert question.sizes == tuple(len(choice.encode()) for choice in line["choices"])
        assert question.characters == tuple(len(choice) for choice in line["choices"])
        for ids, text in zip(question.choices, line["choices"], strict=True):
            whole = tokenizer.encode_batch([line["context"] + text])[0]
            np.testing.assert_array_equal([*question.context, *ids], [tokenizer.eos_id, *whole])
    assert read_questions(url, tokenizer, "")[2].choices[0] != read_questions(url, tokenizer, " ")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_line_feeds_and_nowhere_else(built, tmp_path, end):
    """Characters at which Python's text ends a line belong to a question; blank lines do not."""
    texts = ["a\u2028b", "c\u0085d", "e\u2029f"]
    asked = [{"context": text, "choices": ["x", f"y{text}"], "gold": 1} for text in texts]
    lines = [json.dumps(question, ensure_ascii=False) for question in asked]
    url = str(tmp_path / "lines.jsonl")
    storage.write_atomic(url, end.join([lines[0], "", *lines[1:], " ", ""]).encode())
    tokenizer = built.open(built.tokenizer, Tokenizer).load()
    found = read_questions(url, tokenizer, "")
    assert [question.characters for question in found] == [(1, 1 + len(text)) for text in texts]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"context": "a"}',
        b'{"context": "a", "choices": ["b", "c"], "gold": 2}',
        b'{"context": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "gold": 0}',
        b'{"context": "a", "choices": ["b", 1], "gold": 0}',
        b'{"context": 1, "choices": ["b", "c"], "gold": 0}',
        b'{"context": "a", "choices": ["b", "c"], "gold": true}',
        b"[]",
        b'{"context": "\xe9", "choices": ["b", "c"], "gold": 1}',
        b'{"context": "a", "choices": "bc", "gold": 0}',
        b'{"context": "a", "choices": ["b", "c"], "gold": 0.5}',
        b'{"context": "a", "choices": ["b", "c"], "gold": "1"}',
    ],
)
def test_a_line_that_is_no_question_is_refused(built, tmp_path, line):
    url = str(tmp_path / "bad.jsonl")
    good = b'{"context": "a", "choices": ["b", "c"], "gold": 1}'
    storage.write_atomic(url, good + b"\n" + line)
    tokenizer = built.open(built.tokenizer, Tokenizer).load()
    with pytest.raises(InputError, match="line 2"):
        read_questions(url, tokenizer, " ")


def test_the_harness_is_named_where_it_is_missing(built):
    """Without lm_eval the step says what to install; with it an unknown task is refused."""
    with pytest.raises(StepFailed, match=r"ponente\[lm-eval\]|has no task|no_such_task"):
        bring_up(built.store, lm_evaluation(built.model, built.tokenizer, tasks=("no_such_task",)))
