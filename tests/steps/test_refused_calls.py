"""Arguments that cannot work are refused where the graph is declared: no step has run then."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline import InputError, pod
from steps.documents.decontaminate import decontaminate
from steps.documents.deduplicate import deduplicate
from steps.documents.sample import sample
from steps.evaluation.downstream import lm_evaluation
from steps.evaluation.evaluate import Also, evaluate
from steps.evaluation.follow import follow
from steps.evaluation.generate import generate
from steps.exchange.import_hf import import_hf
from steps.pages.compare import compare
from steps.tokens.conversations import conversations
from steps.tokens.integer_rows import integer_rows
from steps.tokens.pack import pack
from steps.tokens.sequences import Phase, block_shuffle, mix
from steps.tokens.token_cache import tokenize
from steps.tokens.tokenizer import byte_tokenizer, tokenizer, train_tokenizer
from steps.training.continue_training import extend, warm_start
from steps.training.train import train
from tests.pipeline.helpers import check_invariants
from tests.steps.mini import MINI, run
from tests.steps.synthetic import synthetic
from tests.training import tiny
from training.config import Group, OptimizerConfig, TrainConfig

TOKENS = synthetic()
SEQUENCES = block_shuffle(TOKENS, sequence_length=16)
TOKENIZER = train_tokenizer(sample("a.parquet", tokens=9), vocab_size=300)
SIX = TrainConfig(steps=4, batch_size=6, sequence_length=16)
GROWING = dataclasses.replace(SIX, batch_schedule=((2, 9),))
LATER = dataclasses.replace(SIX, steps=8, batch_schedule=((4, 9),))
HOW = {"model": tiny.MODEL, "optimizer": OptimizerConfig()}
SHORT = dataclasses.replace(tiny.MODEL, positions="learned", context=8)
MODEL = train(SEQUENCES, train=SIX, **HOW)
GROUPED = OptimizerConfig(kind="muon", head=Group(learning_rate=0.004), muon_row_beta=0.9)
MUON = train(SEQUENCES, train=SIX, model=tiny.MODEL, optimizer=GROUPED)
REST = {"optimizer": OptimizerConfig(), "hardware": pod("cpu-2x1")}
IMPORTED = import_hf("/models/some")


def _extended(optimizer):
    longer = dataclasses.replace(SIX, steps=8)
    return extend(MODEL, SEQUENCES, optimizer=optimizer, train=longer)


def _extended_muon(**changes):
    longer = dataclasses.replace(SIX, steps=8)
    optimizer = dataclasses.replace(GROUPED, **changes)
    return extend(MUON, SEQUENCES, optimizer=optimizer, train=longer)


def test_a_mixture_has_the_held_out_splits_of_its_first_input():
    """However many steps are between these and the mixture."""
    train(mix([DEEP, UNVALIDATED], weights=(1, 1)), train=FOUR, **OTHER)
    with pytest.raises(InputError, match="no validation tokens"):
        train(mix([UNVALIDATED, DEEP], weights=(1, 1)), train=FOUR, **OTHER)


def test_only_what_made_the_tokens_says_how_many_ids_they_have():
    """Not the tokenizer that counted the budget of the sample."""
    counted = sample("a.parquet", TOKENIZER, tokens=9, splits=(("validation", 5),))
    rows = block_shuffle(tokenize(counted, byte_tokenizer()), 32)
    model = dataclasses.replace(tiny.MODEL, vocab_size=257)
    trained = train(rows, train=FOUR, model=model, optimizer=OptimizerConfig())
    generate(trained, tokenizer("tokenizer.json", vocab_size=257), prompts=("a",))
    of_integers = dataclasses.replace(tiny.MODEL, vocab_size=64)
    with pytest.raises(InputError, match="has 300 ids"):
        train(
            block_shuffle(INTEGERS, 8), train=FOUR, model=of_integers, optimizer=OptimizerConfig()
        )


def test_a_continued_run_may_change_what_is_in_no_array():
    """Rates, decays and their schedules, and how Muon iterates; also the betas."""
    _extended_muon(
        head=Group(learning_rate=0.002, beta1=0.8),
        cautious_decay=True,
        weight_decay_schedule="cosine",
        muon_iteration="polar_express",
        muon_row_beta=0.95,
    )


def _with_moments(optimizer):
    return warm_start(MODEL, SEQUENCES, take="moments", optimizer=optimizer, train=SIX)


# The same from text: what the steps above were asked is in the graph.
TEXT = sample("a.parquet", tokens=9, splits=(("validation", 5), ("nothing", 0)))
WORDS = tokenize(TEXT, train_tokenizer(TEXT, vocab_size=300))
LONG = block_shuffle(WORDS, 32)
UNVALIDATED = block_shuffle(tokenize(sample("a.parquet", tokens=9), TOKENIZER), 32)
BATCH = TrainConfig(batch_size=6)
WORDS_OF_CHATS = conversations("a.jsonl", TOKENIZER, template="alpaca", sequence_length=8)
INTEGERS = integer_rows("a.parquet", vocab_size=300, sequence_length=8, splits=(("validation", 1),))
# Of validation tokens that more steps lie above.
DEEP = block_shuffle(tokenize(deduplicate(TEXT), train_tokenizer(TEXT, vocab_size=300)), 32)
FOUR = TrainConfig(steps=4, batch_size=6)
OTHER = {"model": dataclasses.replace(tiny.MODEL, vocab_size=300), "optimizer": OptimizerConfig()}
WRITER = train(LONG, train=BATCH, epochs=1, **OTHER)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sample("a", tokens=0), "tokens=0"),
        (lambda: sample("a", tokens=5, unit="file"), "unit='file'"),
        (lambda: sample(TEXT, tokens=5, unit="row_group"), "found documents of sample"),
        (lambda: sample(deduplicate(TEXT), tokens=5), "splits, found validation of sample"),
        (lambda: decontaminate("a.parquet", ()), "expected one or more EvaluationTexts"),
        (lambda: pack(WORDS_OF_CHATS, sequence_length=8), "the rows that `conversations` makes"),
        (lambda: pack(INTEGERS, sequence_length=8), "the rows that `integer_rows` makes"),
        (lambda: sample("a", tokens=5, splits={"validation": 5}), "order decides"),
        (lambda: sample("a", tokens=5, splits=(("validation", 100))), "order decides"),
        (lambda: train(SEQUENCES, train=SIX, hardware="v6e-16", **HOW), "expected Hardware"),
        (lambda: evaluate(MODEL, TOKENS, also=None), "expected Also, got None"),
        (lambda: mix([SEQUENCES], weights=1.0), r"mix\(\.\.\.\)"),
        (lambda: generate(MODEL, TOKENIZER, prompts=("a",), new_tokens=None), "generate"),
        (lambda: train_tokenizer(sample("a", tokens=9), vocab_size=9), "vocab_size=9"),
        (lambda: pack(TOKENS, sequence_length=1), "sequence_length=1"),
        (lambda: block_shuffle(TOKENS, sequence_length=0), "block_shuffle.sequence_length"),
        (lambda: block_shuffle(TOKENS, sequence_length=9, window_blocks=0), "window_blocks"),
        (lambda: block_shuffle(WORDS, sequence_length=73), "longer than the 9 tokens"),
        (lambda: mix([SEQUENCES] * 2, weights=(1.0,)), "one weight per input"),
        (lambda: mix([SEQUENCES], weights=(0.0,)), "weights"),
        (
            lambda: mix([SEQUENCES], weights=(1,), later=(Phase(start_tokens=0, weights=(1,)),)),
            "start",
        ),
        (
            lambda: train(
                SEQUENCES, train=SIX, model=tiny.MODEL, optimizer=OptimizerConfig(warmup=5)
            ),
            "warmup of 5 and decay of 0 steps do not fit into 4 steps",
        ),
        (lambda: OptimizerConfig(decay=1.5), "decay: expected a fraction .* found 1.5"),
        (
            lambda: train(SEQUENCES, train=SIX, model=SHORT, optimizer=OptimizerConfig()),
            "16 is more than the 8 learned positions",
        ),
        (lambda: extend(MODEL, SEQUENCES, train=SIX, at=4, **REST), "below the 4 steps"),
        (lambda: extend(MODEL, SEQUENCES, train=SIX, **REST), "has done 4 steps and"),
        (lambda: extend(MODEL, SEQUENCES, train=LATER, **REST), "batch of 9 from step 4 on"),
        *(
            (
                lambda changes=changes: extend(
                    MODEL, SEQUENCES, train=dataclasses.replace(SIX, steps=8, **changes), **REST
                ),
                f"{words}, with which train was trained",
            )
            for changes, words in (
                ({"ema": 0.9}, "TrainConfig.ema: expected 0.0"),
                ({"average_last": 2}, "TrainConfig.average_last: expected 0.0"),
                ({"spike_guard": 3.0}, "TrainConfig.spike_guard: expected 0.0"),
            )
        ),
        *(
            (
                lambda field=field, value=value, going_on=going_on: going_on(
                    OptimizerConfig(**{field: value})
                ),
                f"OptimizerConfig.{field}: expected .*, with which train was .* found '{value}'",
            )
            for field, value in (("kind", "muon"), ("moment_dtype", "bfloat16"))
            for going_on in (_extended, _with_moments)
        ),
        *(
            (lambda changes=changes: _extended_muon(**changes), f"{words}, with which train was")
            for changes, words in (
                ({"head": Group()}, "OptimizerConfig.head: expected Group.*"),
                ({"matrices": Group(kind="adamw")}, "OptimizerConfig.matrices: expected Group.*"),
                ({"muon_row_beta": None}, "OptimizerConfig.muon_row_beta: expected 0.9"),
                (
                    {"muon_momentum_start": 0.85, "muon_momentum_warmup": 9},
                    r"OptimizerConfig.muon_momentum_start and _end: expected \(None, None\)",
                ),
            )
        ),
        (
            lambda: extend(
                MODEL,
                SEQUENCES,
                train=dataclasses.replace(SIX, steps=8, batch_size=4),
                **REST,
            ),
            "has read 24 sequences in its first 4 steps, these settings would have read 16",
        ),
        (
            lambda: warm_start(IMPORTED, SEQUENCES, take="moments", train=SIX, **REST),
            "imported and has no moments",
        ),
        (lambda: warm_start(MODEL, SEQUENCES, take="model", train=GROWING, **REST), "batch of 9"),
        (lambda: warm_start(MODEL, SEQUENCES, take="everything", train=SIX, **REST), "use extend"),
        (lambda: generate(MODEL, TOKENIZER, prompts=()), "at least one prompt"),
        (lambda: generate(MODEL, TOKENIZER, prompts=("a",), new_tokens=0), "new_tokens"),
        (lambda: generate(MODEL, TOKENIZER, prompts=("a",), temperature=-1), "temperature"),
        (
            lambda: evaluate(MODEL, TOKENS, sequences=0),
            "evaluation.sequences: expected int >= 1, found 0",
        ),
        (lambda: follow(MODEL, TOKENS, also=Also(prompts=("x",))), "prompts need a tokenizer"),
        (lambda: Also(new_tokens=0), "Also.new_tokens"),
        (lambda: Also(top_k=0), "top_k"),
        (lambda: train(LONG, train=BATCH, epochs=1, **HOW), "the tokenizer has 300 ids"),
        (lambda: train(LONG, train=SIX, **OTHER), "length is 16, the shuffled sequences are 32"),
        (lambda: train(LONG, train=BATCH, **OTHER), "expected a budget, found none"),
        (lambda: train(LONG, train=BATCH, epochs=1, tokens=9, **OTHER), "found both"),
        (lambda: train(LONG, train=BATCH, epochs=0, **OTHER), "epochs=0: expected more than 0"),
        (
            lambda: train(mix([LONG], weights=(1.0,)), train=BATCH, epochs=1, **OTHER),
            "a mixture has no epochs",
        ),
        (lambda: train(UNVALIDATED, train=BATCH, epochs=1, **OTHER), "no validation tokens"),
        (
            lambda: train(LONG, train=BATCH, epochs=1, splits=("test",), **OTHER),
            "no held-out split 'test'; sample makes validation;",
        ),
        (lambda: evaluate(WRITER, splits=("nothing",)), "no held-out split 'nothing'"),
        (lambda: evaluate(WRITER, batch_size=0), "batch_size"),
        (lambda: extend(WRITER, LONG, train=BATCH, **REST), "the total number of steps"),
        (
            lambda: warm_start(MODEL, UNVALIDATED, take="model", train=SIX, **REST),
            "the tokenizer has 300",
        ),
        (
            lambda: generate(WRITER, train_tokenizer(TEXT, vocab_size=301), prompts=("a",)),
            "the model's tokenizer has 300 ids, the one given 301",
        ),
        (lambda: block_shuffle(pack(WORDS, sequence_length=8), 9), "packed into rows of 8"),
        (lambda: mix([LONG, block_shuffle(WORDS, 8)], weights=(1, 1)), "sequence_length 8 and 32"),
        (lambda: train_tokenizer(TEXT, vocab_size=300, tokens=0), "train_tokenizer.tokens"),
        (
            lambda: train_tokenizer(TEXT, vocab_size=300, special_tokens=("<a>", "<a>")),
            "train_tokenizer.special_tokens: expected different names",
        ),
        (
            lambda: train_tokenizer(TEXT, vocab_size=300, special_tokens=("<|endoftext|>",)),
            r"other than <\|endoftext\|>, which it has",
        ),
        (
            lambda: train_tokenizer(TEXT, vocab_size=300, pre_tokenizer="gpt3"),
            "one of gpt2, cl100k",
        ),
        (lambda: lm_evaluation(MODEL, TOKENIZER, tasks=()), "names of tasks"),
        (
            lambda: lm_evaluation(MODEL, TOKENIZER, tasks=("a",), hardware=pod("cpu-2x1")),
            "one process",
        ),
        (lambda: compare((MODEL, MODEL), names=("a",)), "2 runs and 1 names"),
        (lambda: compare((MODEL, MODEL), names=("a", "a")), "different names"),
    ],
)
def test_a_call_that_cannot_work_is_refused(call, words):
    """By the argument's name, at the line of the experiment that makes the call."""
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.slow
def test_the_command_says_so_in_one_line_and_begins_nothing(capsys, tmp_path):
    """No prompts to write after, which used to matter only when the model was trained."""
    store = str(tmp_path / "store")
    assert run(store, settings=dataclasses.replace(MINI, prompts=())) == 1
    error = capsys.readouterr().err
    assert "at least one prompt" in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1
    assert not check_invariants(store)
