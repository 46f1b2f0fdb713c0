"""`decontaminate` through the engine, against a search in lists of words."""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.filters import Length
from pipeline import InputError
from pipeline.errors import StepFailed
from pipeline.plan.lineage import lineage
from steps import byte_tokenizer, conversations, sample, tokenize, train_tokenizer
from steps.artifacts import TokenCache
from steps.documents.decontaminate import decontaminate
from steps.documents.evaluation_texts import EvaluationTexts, evaluation_texts, harness_texts
from steps.documents.transform import filter_documents
from steps.exchange.decontamination import data_sources, decontaminated, decontamination
from tests.pipeline.helpers import executed
from tests.steps.built import built
from tests.steps.documents.test_sample import published, rows

WORDS = np.array([f"word{index}" for index in range(3000)])
RNG = np.random.default_rng(0)
QUESTIONS = [
    {
        "context": " ".join(RNG.choice(WORDS, 14)),
        "choices": ["yes it is", "no it is not"],
        "gold": 0,
    }
    for _ in range(6)
] + [{"context": "too short", "choices": ["a", "b"], "gold": 1}]
ESSAYS = [" ".join(RNG.choice(WORDS, size)) for size in (40, 9)]


def texts():
    """Documents of 60 words; every seventh with a question, every eleventh with an essay's part."""
    found = []
    for number in range(80):
        words = list(RNG.choice(WORDS, 60))
        if number % 7 == 3:
            words[20:20] = QUESTIONS[number % 6]["context"].upper().split()
        if number % 11 == 5:
            words[50:50] = [f"“{word}”," for word in ESSAYS[number % 2].split()[:13]]
        found.append(" ".join(words))
    return found


TEXTS = texts()


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def source(tmp_path):
    """Documents in two files."""
    folder = tmp_path / "docs"
    folder.mkdir()
    rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(TEXTS)]
    lines(folder / "0.jsonl", rows[:50])
    pq.write_table(pa.Table.from_pylist(rows[50:]), folder / "1.parquet")
    return str(folder)


@pytest.fixture
def questions(tmp_path):
    return lines(tmp_path / "quiz.v1.jsonl", QUESTIONS)


def plain(text):
    return [word.strip("“”,").lower() for word in text.split()]


def has(text, sought):
    """Whether the words of a text have 13 words of another one in a row, or all of its 8 to 12."""
    words, sought = plain(text), plain(sought)
    length = min(13, len(sought))
    inside = {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}
    windows = [tuple(sought[i : i + length]) for i in range(len(sought) - length + 1)]
    return length >= 8 and any(window in inside for window in windows)


def test_documents_with_a_question_are_dropped(tmp_path, source, questions):
    """And counted by set, with what could not be looked for."""
    essays = tmp_path / "essays.parquet"
    pq.write_table(pa.table({"body": [{"essay": essay} for essay in ESSAYS]}), essays)
    against = (questions, evaluation_texts(str(essays), columns=("body.essay",)))
    made = published(tmp_path / "store", decontaminate(source, against))
    quiz = [any(has(text, q["context"]) for q in QUESTIONS) for text in TEXTS]
    essay = [any(has(text, sought) for sought in ESSAYS) for text in TEXTS]
    clean = [n for n, hits in enumerate(zip(quiz, essay, strict=True)) if not any(hits)]
    assert 0 < sum(quiz) < 20 < len(clean)
    assert 0 < sum(essay) < 20
    assert [(row["id"], row["text"]) for row in rows(made)] == [(f"d{n}", TEXTS[n]) for n in clean]
    both = sum(a and b for a, b in zip(quiz, essay, strict=True))
    dropped = made.result["dropped"]
    assert sum(dropped.values()) == len(TEXTS) - len(clean) == sum(quiz) + sum(essay) - both
    sets = made.result["contamination"]["sets"]
    assert made.result["contamination"]["ngram"] == 13
    assert {name: sets[name]["documents"] for name in sets} == {
        "quiz": sum(quiz),
        "essays": sum(essay),
    }
    assert (sets["quiz"]["items"], sets["quiz"]["unchecked"]) == (7, 1)
    assert (sets["essays"]["items"], sets["essays"]["unchecked"]) == (2, 0)
    examples = sets["essays"]["examples"]
    assert 0 < len(examples) <= 5
    assert all(any(has(found["text"], sought) for sought in ESSAYS) for found in examples)
    assert any("quiz" in line for line in made.result["headline"])


def test_spans_are_removed_and_nothing_is_found_again(tmp_path, source, questions):
    store = tmp_path / "store"
    node = decontaminate(source, questions, remove="span", margin=10, shortest=20)
    made = published(store, node)
    found = {row["id"]: row["text"] for row in rows(made)}
    for number, text in enumerate(TEXTS):
        if any(has(text, q["context"]) for q in QUESTIONS):
            left, right = found[f"d{number}/0"], found[f"d{number}/1"]
            assert text.startswith(left)
            assert text.endswith(right)
            assert 10 <= len(text) - len(left) - len(right) - len(QUESTIONS[0]["context"]) < 60
        else:
            assert found[f"d{number}"] == text
    about, tokens = made.result["contamination"], sum(-(-len(text.encode()) // 4) for text in TEXTS)
    assert about["cut"]["documents"] == about["sets"]["quiz"]["documents"]
    assert about["cut"]["pieces"] == 2 * about["cut"]["documents"]
    assert about["cut"]["tokens"] == tokens - made.result["tokens_kept"] > 0
    received = (made.result["documents_seen"], made.result["tokens_seen"])
    assert received == (len(TEXTS), tokens)
    again = published(store, decontaminate(node, questions, remove="span"))
    assert again.result["contamination"]["sets"]["quiz"]["hits"] == 0
    assert again.result["documents_seen"] == again.result["documents_kept"] == len(found)


def test_a_changed_evaluation_set_makes_the_output_stale(tmp_path, source, questions):
    store = str(tmp_path / "store")
    published(store, decontaminate(source, questions))
    assert executed(store, decontaminate(source, questions)) == []
    lines(tmp_path / "quiz.v1.jsonl", QUESTIONS[1:])
    assert executed(store, decontaminate(source, questions)) == [
        "evaluation_texts",
        "decontaminate",
    ]


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        ([{"question": "a"}], (), "expected text, found a row of question"),
        ([{"question": "a"}], ("q",), "expected q, found a row of question"),
        ([{"text": ""}, {"text": None}], (), "expected texts of an evaluation set, found none"),
        ([["a"]], (), "expected rows with columns"),
    ],
)
def test_a_set_without_texts_is_refused(tmp_path, rows, columns, said):
    source = lines(tmp_path / "set.jsonl", rows)
    with pytest.raises(StepFailed, match=said):
        built(tmp_path / "store", evaluation_texts(source, columns=columns), EvaluationTexts)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "set.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(StepFailed, match=r"set\.jsonl, line 2: expected JSON"):
        built(tmp_path / "s", evaluation_texts(str(tmp_path / "set.jsonl")), EvaluationTexts)


def test_what_cannot_work_is_refused_when_it_is_declared(tmp_path, source, questions):
    for wrong in ({"ngram": 0}, {"least": 0}, {"margin": -1}, {"remove": "words"}, {"pieces": 0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            decontaminate(source, questions, **wrong)
    with pytest.raises(InputError, match="EvaluationTexts"):
        decontaminate(source, ())
    with pytest.raises(InputError, match="names of tasks"):
        harness_texts(tasks="gsm8k")
    twice = decontaminate(source, (questions, evaluation_texts(questions, columns=("context",))))
    with pytest.raises(StepFailed, match="two evaluation sets are named 'quiz'"):
        published(tmp_path / "store", twice)


def test_a_set_of_short_texts_is_warned_of(tmp_path, source):
    quiz = lines(tmp_path / "short.jsonl", [{"text": "three words only"}] * 2)
    events = []
    made = published(tmp_path / "store", decontaminate(source, quiz), events=events)
    assert made.result["contamination"]["sets"]["short"]["unchecked"] == 2
    assert any("short: no text has 8 words" in str(event) for event in events)


TASK = """
task: local_quiz
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{context}} Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
"""


def test_cards_say_what_the_data_were_searched_for(tmp_path, source, questions):
    """Of the documents of each token cache, whatever its tokenizer was trained on."""
    store = tmp_path / "store"
    clean = decontaminate(source, questions)
    trained = train_tokenizer(clean, vocab_size=300)
    whole = sample(source, tokens=-1)
    searched = built(store, tokenize(sample(clean, tokens=-1), byte_tokenizer()), TokenCache)
    other = built(store, tokenize(whole, trained), TokenCache)
    found = published(store, clean).result["contamination"]["sets"]["quiz"]
    assert found["documents"]
    row = f"| quiz | 7 | 1 | {found['documents']} | {found['hits']} |"
    for paths, names, missing in (
        ([searched.path], "quiz", 0),
        ([other.path], "", 1),
        ([searched.path, other.path], "", 1),
    ):
        ancestors = lineage(paths)
        assert decontaminated(ancestors) == names
        lines = decontamination(ancestors)
        assert row in lines
        assert sum(line.startswith("Not searched") for line in lines) == missing
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": r, "content": "hello"} for r in ("user", "assistant")]})
    )
    chats = conversations(
        str(tmp_path / "chats.jsonl"), byte_tokenizer(), template="alpaca", sequence_length=64
    )
    ancestors = lineage([searched.path, built(store, chats, TokenCache).path])
    assert decontaminated(ancestors) == ""
    assert "Not searched for evaluation sets: conversations." in decontamination(ancestors)
    alone = lineage([built(store, tokenize(whole, byte_tokenizer()), TokenCache).path])
    assert decontaminated(alone) == ""
    assert [line for line in decontamination(alone) if line][1:] == [
        "Not searched for evaluation sets: tokenize."
    ]


def test_data_sources_are_those_of_the_training_documents(tmp_path, source, questions):
    """Not the evaluation sets, nor what a tokenizer was trained on."""
    other = lines(tmp_path / "other.jsonl", [{"text": text} for text in TEXTS])
    clean = decontaminate(source, questions)
    made = tokenize(clean, train_tokenizer(other, vocab_size=300))
    path = built(tmp_path / "store", made, TokenCache).path
    (found,) = map(str, data_sources(path, lineage([path])))
    assert source in found


def test_a_search_that_was_reused_is_reported_once(tmp_path, source, questions):
    """By the step that refers to it."""
    bounds = [Length(min_words=least) for least in (0, 1)]
    same = [decontaminate(filter_documents(source, keep=keep), questions) for keep in bounds]
    first, last = (published(tmp_path / "store", each) for each in same)
    assert last.home == first.path
    assert sum("| quiz |" in line for line in decontamination(lineage([last.path]))) == 1


def test_a_missing_harness_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(StepFailed, match=r"install ponente\[lm-eval\]"):
        built(tmp_path / "store", harness_texts(tasks=("gsm8k",)), EvaluationTexts)


@pytest.mark.slow
def test_the_texts_of_a_task_of_the_harness(tmp_path, source, questions, monkeypatch):
    """By the task's name and its folder, without network; needs lm_eval."""
    pytest.importorskip("lm_eval", reason="the optional extra lm-eval is missing")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "local_quiz.yaml").write_text(TASK % questions)
    node = harness_texts(tasks=("local_quiz",), include_path=str(folder))
    texts = built(tmp_path / "store", node, EvaluationTexts)
    found = pq.read_table(texts.files()["local_quiz"]).to_pylist()
    own = [row["text"] for row in found if row["item"] == 0]
    context, choices = QUESTIONS[0]["context"], QUESTIONS[0]["choices"]
    shown = [f"Question: {context} Answer: {choice}" for choice in choices]
    assert own == [*shown, context, *choices]
    made = published(tmp_path / "store", decontaminate(source, node))
    other = published(tmp_path / "store", decontaminate(source, questions))
    hit = made.result["contamination"]["sets"]["local_quiz"]["documents"]
    assert hit == other.result["contamination"]["sets"]["quiz"]["documents"] > 0
    with pytest.raises(StepFailed, match="no task"):
        built(tmp_path / "store", harness_texts(tasks=("no_such_task",)), EvaluationTexts)
