"""The toy graphs as an experiment file of ours: `python -m tests.bench.engine_ours --preset 20`."""

from __future__ import annotations

from tests.bench import engine_clock


def _main() -> None:
    with engine_clock.importing():
        from tests.bench.engine_graphs import experiment
    experiment.main()


if __name__ == "__main__":
    _main()
