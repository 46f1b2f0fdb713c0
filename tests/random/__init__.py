"""Random inputs against an independent oracle: each is answered as by the oracle, or refused.

A suite is a module with `SUITES`, each a `Fault` of `tests.faults.registry`: `ci` trials are in the
gate, `full` are a command, `python -m tests.random --only NAME`.
"""

NAMES = (
    "configs",
    "continuations",
    "files",
    "plans",
    "schedules",
    "special_ids",
    "tensor_files",
    "texts",
)
