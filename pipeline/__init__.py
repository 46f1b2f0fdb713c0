"""The engine: a graph of cached, resumable steps. It handles files and functions, not tokens.

No machine learning library is imported here, so that planning a graph starts at once.
"""

from pipeline.errors import InputError, PonenteError
from pipeline.experiment import Experiment
from pipeline.graph.artifact import Artifact, Live
from pipeline.graph.hardware import Hardware, local, pod
from pipeline.graph.module_names import come_first
from pipeline.graph.order import named
from pipeline.graph.step import Result, step
from pipeline.graph.step_context import GangProcess, StepContext
from pipeline.identity.fingerprint import Runtime
from pipeline.identity.listing import External
from pipeline.sweep import select, sweep

come_first()

__all__ = [
    "Artifact",
    "Experiment",
    "External",
    "GangProcess",
    "Hardware",
    "InputError",
    "Live",
    "PonenteError",
    "Result",
    "Runtime",
    "StepContext",
    "local",
    "named",
    "pod",
    "select",
    "step",
    "sweep",
]
