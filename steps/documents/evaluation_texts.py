"""The texts of evaluation sets, which `decontaminate` looks for in documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from data.read.listing import absolute, list_folder, list_source
from pipeline import Artifact, External, InputError, Result, StepContext, step
from pipeline.store import storage
from steps.gang import HUB

if TYPE_CHECKING:
    from data.prepare.ngrams import Item

_FILE = "texts.parquet"


class EvaluationTexts(Artifact):
    """The texts of one or more evaluation sets: Parquet (item, text), a shard for each."""

    def files(self) -> dict[str, str]:
        """URL of the file of each set, by the set's name."""
        return {
            shard.result["set"]: storage.join(self.home, shard.root, _FILE)
            for shard in self.shards("texts/")
        }


@step(output=EvaluationTexts, version=1, environment=HUB)
def evaluation_texts(
    run: StepContext,
    source: Annotated[str, External(list_source, absolute)],
    *,
    name: str | None = None,
    columns: tuple[str, ...] = (),
) -> Result:
    """The texts of an evaluation set that is given as files.

    Args:
        source: Parquet, JSON lines or text (see `data/source.py`), such as the questions of
            `multiple_choice`.
        name: of the set; by default the name of the file or folder.
        columns: names of the columns whose texts are compared, each by itself; "a.b" is the key b
            of a mapping a. By default `context`, continued by each of `choices`, or else `text`.
    """
    from data.prepare.evaluation_set import source_items

    base = source.rstrip("/").rpartition("/")[2].partition(".")[0]
    return _write(run, {name or base or source: source_items(source, columns)}, source)


def _check_tasks(arguments: Mapping[str, Any]) -> None:
    if not arguments["tasks"] or isinstance(arguments["tasks"], str):
        raise InputError(
            'harness_texts: expected names of tasks, such as ("gsm8k",), found '
            f"{arguments['tasks']!r}"
        )


@step(output=EvaluationTexts, version=1, check=_check_tasks, environment=HUB)
def harness_texts(
    run: StepContext,
    *,
    tasks: tuple[str, ...],
    include_path: Annotated[str | None, External(list_folder, absolute)] = None,
) -> Result:
    """The texts of tasks of lm-evaluation-harness, which `ponente[lm-eval]` installs.

    Of each document of a task's test split, or validation split, they are what a model is shown,
    the prompt with each answer, and by themselves the fields of the document that it contains.

    Args:
        tasks: names of tasks or of groups of tasks; each task is a set of its own.
        include_path: a folder with your own tasks as YAML, see `lm_evaluation`.
    """
    import importlib.metadata

    from data.prepare.evaluation_set import harness_items

    written = _write(run, harness_items(tasks, include_path), ", ".join(tasks))
    return {**written, "measured": {"lm_eval": importlib.metadata.version("lm_eval")}}


def _write(run: StepContext, sets: Mapping[str, Iterable[Item]], source: str) -> Result:
    from data.prepare.evaluation_set import write_set

    found = {}
    for number, (name, items) in enumerate(sets.items()):
        with run.shard(f"texts/{number:06d}", about := {"set": name}) as directory:
            about |= write_set(storage.join(directory, _FILE), items)
        if not about["texts"]:
            raise InputError(
                f"{source}: {name}: expected texts of an evaluation set, found none; name other "
                "files, or the columns with text"
            )
        found[name] = {"items": about["items"], "texts": about["texts"]}
    return {
        "sets": found,
        "headline": [f"{name}: {count['items']:,} items" for name, count in found.items()],
    }
