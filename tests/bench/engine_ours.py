"""The toy graphs as an experiment file of ours: `python -m tests.bench.engine_ours --preset 20`."""

from __future__ import annotations

from tests.bench import engine_clock


def _main() -> None:
    with engine_clock.importing():
        from pipeline import main
        from tests.bench.engine_steps import PRESETS, build
    main(build, PRESETS)


if __name__ == "__main__":
    _main()
