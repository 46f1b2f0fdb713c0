"""TensorBoard, Weights & Biases and trackio, each behind `write(entry)` and `close()`.

Their libraries are extras and are imported when a tracker is opened, in the child process of
`training.metrics.trackers.follow`. Where they send things and who they are is set in the
environment, as their own manuals have it: WANDB_API_KEY, WANDB_ENTITY, WANDB_PROJECT, WANDB_MODE,
TRACKIO_DIR, TRACKIO_PROJECT, TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import html
import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.errors import InputError
from pipeline.store import storage
from training.metrics.spool import Spool

Entry = dict[str, Any]
PROJECT = "ponente"
_NOT_METRICS = ("kind", "time", "step", "set")


class Backend(Protocol):
    """A tracker inside its own process: it may block and raise."""

    def write(self, entry: Entry) -> None:
        """Take one entry."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


def open_backend(name: str, context: Mapping[str, Any]) -> Backend:
    """The tracker of that name; `context` as `training.metrics.trackers.children.Trackers` has it.

    Raises:
        InputError: its library is not installed.
    """
    return {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}[name](
        context
    )


def scalars(entry: Entry) -> dict[str, float]:
    """The numbers of an entry under the names that trackers show: "train/loss", "web/loss"."""
    groups = {"step": "train", "evaluation": entry.get("set", "validation")}
    group = groups.get(entry["kind"], entry["kind"])
    return {
        f"{group}/{name}": float(value)
        for name, value in entry.items()
        if name not in _NOT_METRICS and isinstance(value, int | float) and entry["kind"] != "config"
    }


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{error}; install it with: pip install 'ponente[{extra}]'") from error


class TensorBoard:
    """Event files in `<directory>/tensorboard`: scalars, and samples as text."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        writer = _library("tensorboardX", "tensorboard").SummaryWriter
        self._spool = Spool(storage.join(context["directory"], "tensorboard"))
        self._writer = writer(logdir=str(self._spool.path), flush_secs=10)

    def write(self, entry: Entry) -> None:
        """Take one entry."""
        step, when = entry.get("step", 0), entry["time"]
        for name, value in scalars(entry).items():
            self._writer.add_scalar(name, value, step, walltime=when)
        if entry["kind"] == "sample":
            name = f"samples/{entry['prompt'][:60]}"
            self._writer.add_text(name, entry["completion"], step, walltime=when)
        self._spool.sync()

    def close(self) -> None:
        """Finish."""
        self._writer.close()
        self._spool.close()


class WeightsAndBiases:
    """One W&B run for all attempts; the step is a column, so that redone steps are no error."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        self._wandb = wandb = _library("wandb", "wandb")
        directory = context["directory"]
        # The remote of a repository may hold a token; code and output are not for a service.
        quiet = wandb.Settings(
            console="off", disable_git=True, disable_code=True, disable_job_creation=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=_run_id(context),
            name=context["run"],
            resume="allow",
            config=dict(context["config"]),
            dir=storage.local_path(directory) if storage.is_local(directory) else None,
            settings=quiet,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, entry: Entry) -> None:
        """Take one entry."""
        values: dict[str, Any] = scalars(entry)
        if entry["kind"] == "sample":
            text = html.escape(entry["prompt"] + entry["completion"])
            name = f"samples/{_identifier(entry['prompt'][:60])}"
            values[name] = self._wandb.Html(f"<pre>{text}</pre>")
        if values:
            self._run.log({"step": entry.get("step", 0), **values})

    def close(self) -> None:
        """Finish."""
        self._run.finish()


class Trackio:
    """A trackio run: a local database, or a Hugging Face space that TRACKIO_SPACE_ID names."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        trackio = _library("trackio", "trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=_run_id(context),
            config=dict(context["config"]),
            resume="allow",
            embed=False,
        )

    def write(self, entry: Entry) -> None:
        """Take one entry."""
        if values := scalars(entry):
            self._run.log(values, step=entry.get("step", 0))

    def close(self) -> None:
        """Finish."""
        self._run.finish()


def _run_id(context: Mapping[str, Any]) -> str:
    """The same for all attempts at a run, and another when the run is built anew."""
    build = context.get("build")
    return _identifier(f"{context['run']}-{build}" if build else context["run"])


def _identifier(run: str) -> str:
    """A name that services take as an id: letters, digits, `_.-`."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in run)[-64:]
