"""Backends for TensorBoard, Weights & Biases and trackio: one function each logs a run's entries.

The libraries are optional extras, imported in the child process of
`training.metrics.trackers.follow`; `training.metrics.trackers.children.Trackers` defines `context`.
Destination and credentials come from the environment variables that the libraries document:
WANDB_API_KEY, WANDB_ENTITY, WANDB_PROJECT, WANDB_MODE, TRACKIO_DIR, TRACKIO_PROJECT,
TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import InputError
from pipeline.store import storage
from training.config.trackers import INSTALL, TRACKERS
from training.metrics.spool import Spool

Entry = dict[str, Any]
Entries = Iterable[Entry]
PROJECT = "ponente"
_NOT_METRICS = ("kind", "time", "step", "split")


def scalars(entry: Entry) -> dict[str, float]:
    """The numbers of an entry under the trackers' names, such as "train/loss" and "web/loss"."""
    groups = {"step": "train", "evaluation": entry.get("split", "validation")}
    group = groups.get(entry["kind"], entry["kind"])
    return {
        f"{group}/{name}": float(value)
        for name, value in entry.items()
        if name not in _NOT_METRICS and isinstance(value, int | float) and entry["kind"] != "config"
    }


def _library(tracker: str) -> Any:
    try:
        return importlib.import_module(TRACKERS[tracker])
    except ImportError as error:
        raise InputError(f"{error}; {INSTALL.format(tracker)}") from error


def tensorboard(context: Mapping[str, Any], entries: Entries) -> None:
    """Event files in `<shared>/tensorboard`: scalars, and samples as text.

    All attempts write to this directory, so they are one run; each one replaces the steps after
    the checkpoint that it resumed from.
    """
    writer_of = _library("tensorboard").SummaryWriter
    spool = Spool(storage.join(context["shared"], "tensorboard"))
    writer: Any = None
    for entry in entries:
        if entry["kind"] == "config":
            continue
        step, when = entry.get("step", 0), entry["time"]
        if writer is None:
            purge = step + (entry["kind"] == "began")
            writer = writer_of(logdir=str(spool.path), flush_secs=10, purge_step=purge)
        for name, value in scalars(entry).items():
            writer.add_scalar(name, value, step, walltime=when)
        if entry["kind"] == "sample":
            name = sample_name(entry["prompt"])
            writer.add_text(name, entry["completion"], step, walltime=when)
        spool.sync()
    if writer is not None:
        writer.close()
    spool.close()


def wandb(context: Mapping[str, Any], entries: Entries) -> None:
    """One W&B run for all attempts; the step is a metric, so redone steps are logged too."""
    library = _library("wandb")
    directory = context["directory"]
    run = library.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=_run_id(context),
        name=context["run"],
        resume="allow",
        config=dict(context["config"]),
        dir=storage.local_path(directory) if storage.is_local(directory) else None,
        # Upload no output, code or git data: the URL of a git remote may contain a token.
        settings=library.Settings(
            console="off", disable_git=True, disable_code=True, disable_job_creation=True
        ),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for entry in entries:
        values: dict[str, Any] = scalars(entry)
        if entry["kind"] == "sample":
            text = html.escape(entry["prompt"] + entry["completion"])
            values[sample_name(entry["prompt"])] = library.Html(f"<pre>{text}</pre>")
        if values:
            run.log({"step": entry.get("step", 0), **values})
    run.finish()


def trackio(context: Mapping[str, Any], entries: Entries) -> None:
    """A trackio run in a local database, or in the Hugging Face space of TRACKIO_SPACE_ID."""
    run = _library("trackio").init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=_run_id(context),
        config=dict(context["config"]),
        resume="allow",
        embed=False,
    )
    for entry in entries:
        if values := scalars(entry):
            run.log(values, step=entry.get("step", 0))
    run.finish()


BACKENDS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def sample_name(prompt: str) -> str:
    """The name of a prompt's samples; its digest tells prompts apart that read alike in ASCII."""
    name = _identifier(prompt[:48])
    digest = "" if name == prompt else f"-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"
    return f"samples/{name}{digest}"


def _run_id(context: Mapping[str, Any]) -> str:
    """An id that all attempts of a run share; a rebuild of the run has another."""
    build = context.get("build")
    return _identifier(f"{context['run']}-{build}" if build else context["run"])


def _identifier(run: str) -> str:
    """`run` as an id that the services accept: ASCII letters, digits, `_.-`, at most 64."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in run)[-64:]
