"""The command line of the toy experiment, run in this process."""

from __future__ import annotations

import pytest

from tests.pipeline.cli.toy_experiment import TOY


@pytest.fixture
def ponente(tmp_path, capsys):
    """Run the command line in this process; returns (status, stdout, stderr)."""

    def run(*arguments, experiment=TOY):
        verb = arguments[0] if arguments and not arguments[0].startswith("-") else "run"
        inline = ["--executor", "inline"] if verb in ("run", "plan") else []
        with pytest.raises(SystemExit) as stop:
            experiment.main([*arguments, "--prefix", str(tmp_path / "store"), *inline])
        said = capsys.readouterr()
        return stop.value.code or 0, said.out, said.err

    return run
