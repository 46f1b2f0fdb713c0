"""From raw documents to a tokenizer and a token cache: filter, deduplicate, decontaminate, score.

ponente plan experiments/prepare.py            shows what would run, on any machine
ponente run experiments/prepare.py --smoke     the same graph on a laptop, in seconds

docs/guides/prepare_data.md walks through it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import steps
from data.prepare.filters import C4Quality, FineWebQuality, GopherQuality, GopherRepetition
from data.source import fineweb_edu, python_documentation
from pipeline import Experiment

QUESTIONS = str(Path(__file__).parent / "data" / "questions.jsonl")


def prose(document: Mapping[str, Any]) -> float:
    """The share of letters and spaces, which tables, code and menus have less of."""
    text = document["text"]
    return sum(each.isalpha() or each == " " for each in text) / len(text)


def long_enough(document: Mapping[str, Any]) -> bool | str:
    """A rule of one's own, beside the named filters."""
    return len(document["text"]) >= 200 or "under 200 characters"


def prepare(
    source: str = fineweb_edu("sample-10BT"),
    named_filters: bool = True,  # FineWeb's, which need ponente[prepare]
    evaluations: tuple[str, ...] = ("hellaswag", "arc_easy", "piqa"),  # tasks or files
    min_score: float = 0.75,
    train_tokens: int = 4_000_000_000,
    validation_tokens: int = 10_000_000,
    vocab_size: int = 32_768,
    tokenizer_tokens: int | None = 200_000_000,
    seed: int = 0,
) -> tuple[steps.Report, steps.TokenCache]:
    """The page of the preparation, and the tokens."""
    keep: tuple[Any, ...] = (long_enough,)
    if named_filters:
        no_lines = C4Quality(filter_no_terminal_punct=False)
        keep = (long_enough, GopherRepetition(), GopherQuality(), no_lines, FineWebQuality())
    kept = steps.filter_documents(source, keep=keep)
    unique = steps.deduplicate(kept)
    clean = steps.decontaminate(unique, evaluations) if evaluations else unique
    scored = steps.score_documents(clean, by=prose)
    splits = (("validation", validation_tokens),)
    documents = steps.sample(
        scored, tokens=train_tokens, splits=splits, min_score=min_score, seed=seed
    )
    tokenizer = steps.train_tokenizer(documents, vocab_size=vocab_size, tokens=tokenizer_tokens)
    return steps.preparation_report(documents), steps.tokenize(documents, tokenizer)


experiment = Experiment(
    prepare,
    smoke={
        "source": python_documentation(),  # 2 MB of English text that ships with CPython
        "named_filters": False,
        "evaluations": (QUESTIONS,),
        "min_score": 0.7,
        "train_tokens": -1,
        "validation_tokens": 20_000,
        "vocab_size": 1_024,
        "tokenizer_tokens": None,
    },
)

if __name__ == "__main__":
    experiment.main()
