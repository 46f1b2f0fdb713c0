"""What a process is given to execute a step, and how the attempt ended; both are picklable."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.graph.artifact import Source
from pipeline.graph.step import StepSpec
from pipeline.identity import source_code
from pipeline.identity.digests import Identity
from pipeline.identity.listing import Listing
from pipeline.store import manifest
from pipeline.store.ledger import Ledger


@dataclass(frozen=True)
class Input:
    """An output that a step reads."""

    path: str
    key: str
    label: str  # in this graph
    attempt: str = ""  # that published it; empty where that is not known, as for an alias
    live: Source | None = None  # the build of one that may be published until the body ends


@dataclass(frozen=True)
class Request:
    """Everything a process needs to execute a step."""

    step: StepSpec[..., Any]
    label: str
    key: str
    root: str
    inputs: Mapping[str, Input]
    arguments: Mapping[str, Any]
    identity: Identity
    build: str
    provenance: Mapping[str, Any]  # with the step's code as the driver imported it
    replaces: str = ""  # attempt of the published output that this one is to replace
    packages: tuple[str, ...] = ()  # of the step's own code, whose INFO records are logged
    listings: Mapping[str, Listing] = field(default_factory=dict)
    link: bool = False  # its output may refer to those of other stores
    keep_shards: bool = False
    # The driver's values of the variables that the step declares; some are secrets.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def follows(self) -> bool:
        """Whether it has a live input."""
        return any(read.live is not None for read in self.inputs.values())

    @property
    def ledger(self) -> Ledger:
        """The ledger of this build, for the step's code as the driver imported it."""
        code = source_code.code_digest(self.provenance)
        return Ledger(self.root, self.build, code, self.keep_shards)

    def published(self) -> bool:
        """Whether there is an output other than the one to be replaced."""
        return manifest.load_built(self.root, self.key, self.replaces) is not None


class Ending(enum.StrEnum):
    """How an attempt ended."""

    PUBLISHED = "published"
    REUSED = "reused"  # another attempt published
    STOPPED = "stopped"
    FAILED = "failed"  # and would again
    CORRUPT = "corrupt"  # a file was missing or damaged, which the cause names
    LOST = "lost"  # a retry could succeed
    PREEMPTED = "preempted"  # its machine was taken away; resuming uses no try
    UNAVAILABLE = "unavailable"  # its hardware was in use


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; `cause` is one line, `log` the URL of its full log."""

    ending: Ending
    seconds: float = 0.0
    cause: str = ""
    log: str = ""

    @property
    def successful(self) -> bool:
        return self.ending in (Ending.PUBLISHED, Ending.REUSED)

    @property
    def transient(self) -> bool:
        """Whether another attempt could succeed."""
        return self.ending in (Ending.LOST, Ending.PREEMPTED, Ending.UNAVAILABLE)
