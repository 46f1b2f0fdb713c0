"""An experiment as a value: a function that declares a graph, and presets of its settings.

    def run_200m(source: str = fineweb_edu("sample-10BT"), steps: int = 7_600) -> Report:
        documents = sample(source, ...)
        ...
        return report(trained)

    experiment = Experiment(run_200m, smoke=dict(source=python_documentation(), steps=800))

The function's parameters are the settings; their defaults are the full run. Python code plans and
runs it with the methods below; on the command line, `python FILE [VERB]` and `ponente VERB FILE` do
the same, with a flag for every setting.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipeline import cli
from pipeline.cli import context, verbs
from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact
from pipeline.graph.declaration import Declaration, load_experiment, loading
from pipeline.graph.step import as_node
from pipeline.identity.secret_text import is_secret_name

if typing.TYPE_CHECKING:
    from pipeline.plan.plan import Planned

R = TypeVar("R")


class Experiment(Declaration[R]):
    """A graph with settings that can be planned, run and given a command line.

    See `Declaration` for its arguments and attributes.
    `InputError` also for a setting or preset that is named like a flag or like a secret.
    """

    def __init__(self, function: Callable[..., R], **presets: Mapping[str, Any]) -> None:
        super().__init__(function, **presets)
        for name in (*self.setting_names, *presets):
            if f"--{name.replace('_', '-')}" in verbs.SPELLED:
                raise InputError(
                    f"{self.name}: {name!r} is a flag of the command line "
                    f"(--{name.replace('_', '-')}) and cannot be a setting or preset too; rename it"
                )
            if is_secret_name(name):
                raise InputError(
                    f"{self.name}: {name!r} reads as the name of a secret, which no command line "
                    "may carry; rename the setting or preset"
                )

    def plan(self, preset: str | None = None, **settings: Any) -> list[Planned]:
        """The plan of a run: one `Planned` per step, inputs first.

        `settings` override the preset; flags of `ponente plan` may be among them, by name.
        """
        from pipeline.cli import inspection

        return inspection.entries(context.of_call(self, "plan", preset, settings))

    def run(self, preset: str | None = None, **settings: Any) -> R:
        """Bring every step up to date; returns the artifacts of the function: one, or a tuple.

        With `until` or `only`, those of the chosen steps instead: one, or a tuple, inputs first
        within each name.

        Args:
            settings: override the preset; flags of `ponente run` may be among them by name, such
                as `prefix="gs://bucket/runs"` or `executor="ray"`. A store may be a `Path`;
                `shared` and flags of steps take one text, as on the command line, or several.

        Raises:
            PonenteError: a step failed or was refused.
            Cancelled: a first Ctrl-C stopped the run, after it had saved; a second one raises
                `KeyboardInterrupt`.
        """
        from pipeline.cli import run

        asked = context.of_call(self, "run", preset, settings)
        execution = run.bring_up(asked)

        def artifact(node: Any) -> Artifact:
            found = execution.published[as_node(node).key]
            return as_node(node).output(found.path, found.manifest)

        wanted: Any = asked.wanted
        if asked.choice.until or asked.choice.only:
            wanted = tuple(execution.targets)
            wanted = wanted if len(wanted) > 1 else wanted[0]
        if isinstance(wanted, tuple):
            return typing.cast(R, tuple(artifact(node) for node in wanted))
        return typing.cast(R, artifact(wanted))

    def main(self, arguments: list[str] | None = None) -> None:
        """The command line of the experiment's file; exits the process with a status.

        A file that was started as `__main__` is imported again under its own name, as `ponente`
        does, so that its steps have the same keys either way.
        """
        if loading:
            return
        experiment: Declaration[Any] = self
        main = sys.modules.get("__main__")
        if self.function.__module__ == "__main__" and (file := getattr(main, "__file__", None)):
            experiment = cli.exit_with_error(
                lambda: load_experiment(file, self.function.__qualname__)
            )
        cli.main(experiment, sys.argv[1:] if arguments is None else arguments)
