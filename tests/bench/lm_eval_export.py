"""The harness on an exported model against the harness on the checkpoint, with the same tasks.

    python -m tests.bench.lm_eval_export CHECKPOINT FOLDER

CHECKPOINT is the directory of a train step, scored by our `lm_evaluation`; FOLDER its export for
Hugging Face, scored by the harness's own back end (`--model hf`) on the CPU in float32. One JSON
object a line: task, metric, both values. Needs the extras lm-eval and oracle. The tasks are made
here of the CPython corpus: questions (which of four passages follows?) and perplexity of documents.
Nothing is downloaded.

Documents began with the end-of-document id in training, so the harness is asked to put it, the
exported tokenizer's BOS, before questions (`add_bos_token=True`). Before documents it does so by
itself; asked to as well, it would score a second one. Both cut documents into windows of as many
tokens as a row of training predicts: cut one token further on, the text has other contexts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from data.read import python_docs
from steps.checkpoints.find import find, open_tokenizer
from training.config import TrainConfig
from training.evaluate.checkpoint_scorer import load_scored
from training.evaluate.lm_eval_adapter import adapter, run_tasks

CHOICES = ("acc", "acc_norm", "acc_bytes")
PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte")


def passages(count: int) -> list[list[str]]:
    """The first words of documents: what a question shows and what follows it."""
    texts = [" ".join(t.split()[:40]) for t in python_docs.documents()["text"].to_pylist()]
    texts = [t for t in texts if len(t.split()) == 40 and t.isascii()]
    return [[" ".join(t.split()[:20]), t] for t in random.Random(0).sample(texts, count)]


def tasks(folder: Path, count: int) -> list[dict[str, Any]]:
    """Configurations of both tasks, with their data in `folder`."""
    found, draw = passages(count), random.Random(1)
    rows = []
    for begins, whole in found:
        own = whole.removeprefix(begins).strip()
        others = [w.removeprefix(b).strip() for b, w in draw.sample(found, 3)]
        choices = draw.sample([own, *others], 4)
        rows.append(
            {"context": begins, "choices": choices, "gold": choices.index(own), "text": whole}
        )
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
    }
    return [
        {
            **common,
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": _metrics(CHOICES, higher=True),
        },
        {
            **common,
            "task": "perplexity",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": _metrics(PERPLEXITIES, higher=False),
        },
    ]


def _metrics(names: tuple[str, ...], *, higher: bool) -> list[dict[str, Any]]:
    if higher:
        return [{"metric": n, "aggregation": "mean", "higher_is_better": True} for n in names]
    return [{"metric": name} for name in names]


def checkpoint_scores(directory: str, asked: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By our adapter."""
    trained = find(directory)
    tokenizer = open_tokenizer(trained)
    train = TrainConfig(
        steps=1,
        batch_size=8,
        sequence_length=trained.sequence_length,
        compute_dtype="float32",
    )
    likelihood, model = load_scored(trained.path, trained.model, train, tokenizer.eos_id)
    lm = adapter(model, likelihood, tokenizer, trained.sequence_length)
    return run_tasks(lm, asked, bootstrap_iters=0)


def folder_scores(
    folder: Path, asked: list[dict[str, Any]], longest: int
) -> dict[str, dict[str, Any]]:
    """By the harness's back end for `transformers`, in windows of `longest` tokens."""
    from lm_eval.models.huggingface import HFLM  # pyrefly: ignore[missing-import]

    found: dict[str, dict[str, Any]] = {}
    for task in asked:
        first = task["output_type"] == "multiple_choice"
        settings = {"batch_size": 8, "add_bos_token": first, "max_length": longest}
        lm = HFLM(str(folder), device="cpu", dtype="float32", **settings)
        found |= run_tasks(lm, [task], bootstrap_iters=0)
    return found


def main() -> None:
    """Print a row for each metric."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asked = tasks(Path(directory), options.questions)
        ours = checkpoint_scores(options.checkpoint, asked)
        longest = find(options.checkpoint).sequence_length - 1
        theirs = folder_scores(options.folder, asked, longest)
    for task, metrics in ours.items():
        for name in (*CHOICES, *PERPLEXITIES):
            if name in metrics:
                row = {"checkpoint": metrics[name], "folder": theirs[task][name]}
                print(json.dumps({"task": task, "metric": name, **row}), flush=True)


if __name__ == "__main__":
    main()
