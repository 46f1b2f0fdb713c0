"""The engine: a graph of cached, resumable steps. It knows files and functions, not tokens.

Nothing of machine learning is imported here, so that planning a graph takes no time.
"""

from pipeline.artifact import Artifact
from pipeline.cli import main
from pipeline.errors import InputError, PonenteError
from pipeline.fingerprint import Runtime
from pipeline.hardware import Hardware, local, pod
from pipeline.live import Live
from pipeline.run import GangProcess, StepRun
from pipeline.step import Result, named, step
from pipeline.sweep import select, sweep

__all__ = [
    "Artifact",
    "GangProcess",
    "Hardware",
    "InputError",
    "Live",
    "PonenteError",
    "Result",
    "Runtime",
    "StepRun",
    "local",
    "main",
    "named",
    "pod",
    "select",
    "step",
    "sweep",
]
