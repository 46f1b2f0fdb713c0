"""Wrong usage, secrets, help, version: what the command line says of itself."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest

from pipeline.cli import verbs
from pipeline.identity.secret_text import redacted
from tests.pipeline.cli.toy_experiment import EXPERIMENT, TOY


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["pln"], 2, "no verb 'pln'; did you mean plan?"),
        (["plan", "--presett", "wide"], 2, "no flag '--presett'; did you mean --preset?"),
        (["plan", "--cuont", "3"], 2, "no flag '--cuont'; did you mean --count?"),
        (["--preset", "wyde"], 2, "no preset 'wyde'; did you mean wide?"),
        (["plan", "numbrs"], 1, "no step 'numbrs'; did you mean numbers?"),
        (["plan", "--delete"], 2, "no flag --delete; gc has it"),
        (["run", "--html", "x.html"], 2, "no flag --html; plan has it"),
        (["run", "numbers"], 2, "takes no 'numbers'"),
        (["doctor", "--bogus"], 2, "no flag '--bogus'"),
        (["show"], 1, "expected one step of numbers, clamp, scaled, total; found none"),
        (["--jobs", "many"], 2, "argument --jobs: expected a number of at least 0, got 'many'"),
        (["--jobs", "-1"], 2, "argument --jobs: expected a number of at least 0, got '-1'"),
        (["--jobs=-1"], 2, "argument --jobs: expected a number of at least 0, got '-1'"),
        (["--hf-token", "x"], 2, "--hf-token: its name looks like a secret"),
        (["--count", "hf_abcdefghijklmnopqrstuv"], 2, "--count: its value looks like a secret"),
        (["--until", "nothing"], 1, "expected one of numbers"),
        (["plan", "--prefix", "/dev/null/x"], 1, "/dev/null/x"),
        (["plan", "--limit", "-1"], 1, "toy_experiment.py:"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_with_the_nearest_name(
    arguments, status, message, capsys, monkeypatch, tmp_path
):
    """Exit status 2 for what no command line has, 1 for what this graph or store refuses."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        TOY.main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == status
    assert message in error
    assert len(error.splitlines()) == 1
    assert "hf_abcdef" not in error


def test_no_secret_of_a_flag_reaches_the_store(ponente, tmp_path):
    """Refused by what it looks like; nothing is recorded, and the message does not repeat it."""
    for secret in (
        *("hf_abcdefghijklmnopqrstuv", "sk-abcdefghijklmnopqrst", "AKIAABCDEFGHIJKLMNOP"),
        *("-----BEGIN PRIVATE KEY-----", "https://me:word@host/x", "gs://b/x?X-Goog-Signature=aa"),
    ):
        status, out, err = ponente(f"--only={secret}")
        assert status == 2
        assert "environment variable" in err
        assert secret not in out + err
        assert redacted(["run", secret])[1] != secret
    assert not (tmp_path / "store").exists()
    assert redacted(["run", "--tokens", "5", "gs://bucket/runs"])[1:] == [
        *("--tokens", "5", "gs://bucket/runs")
    ]


@pytest.mark.parametrize(
    ("file", "status"),
    [
        *(("nowhere.py", 1), ("notes.md", 2), (".", 2)),
        *(("broken_syntax.py", 1), ("no_experiment.py", 1)),
    ],
)
def test_what_is_no_experiment_is_refused_in_one_line(file, status, tmp_path, monkeypatch, typed):
    """Not there, not Python, a directory, Python that does not parse, or without an experiment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("# Notes")
    (tmp_path / "broken_syntax.py").write_text("import os\ndef f(:\n")
    (tmp_path / "no_experiment.py").write_text("steps = 8\n")
    ended, _, error = typed("plan", file)
    assert ended == status
    assert file in error
    assert len(error.splitlines()) == 1
    if file == "broken_syntax.py":
        assert "broken_syntax.py:2: SyntaxError" in error
    if file == "no_experiment.py":
        assert "expected a variable with an Experiment(...), found none" in error


MORE = {"write": ("write something", "builtins:len")}


def test_help_has_a_line_for_every_verb_and_fits_a_screen(typed, tmp_path):
    """On stdout when it was asked for, else on stderr; the settings' flags on request."""
    status, out, err = typed("--help", more=MORE)
    assert (status, err) == (0, "")
    assert "unlock     end the lease of an owner that hangs" in out
    assert "write      write something" in out
    assert typed(more=MORE)[::2] == (2, out)
    file = tmp_path / "helpful_experiment.py"
    file.write_text(EXPERIMENT)
    for verb in verbs.VERBS:
        status, out, _ = typed(verb, str(file), "--help")
        assert status == 0
        assert verbs.VERBS[verb].help in out
        assert len(out.splitlines()) <= 40
    assert "--delete" not in out
    status, out, _ = typed("run", str(file), "--other", "--help-settings")
    assert status == 0
    assert "--count INT" in out
    assert "20" in out


def test_version_and_completion(typed):
    """The version is the package's; completions are a script that knows verbs and flags."""
    version = importlib.metadata.version("ponente")
    assert typed("--version")[1] == f"ponente {version}\n"
    for shell in ("bash", "zsh"):
        status, script, _ = typed("completion", shell)
        assert status == 0
        assert "--keep-going" in script
        assert "verify" in script
    assert typed("completion", "fish")[0] == 2
