"""Every command line of the pages is one that the real parsers take."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import sys
import types
from typing import Any

import pytest

from pipeline.cli import launch, options, verbs
from pipeline.errors import PonenteError
from pipeline.graph.declaration import Declaration, load_experiment
from pipeline.identity.secret_text import refuse_secrets
from pipeline.launch import TARGETS
from pipeline.store import storage
from steps.cli import dashboard, dial, export, generate, rewind, trace_document
from tests.docs.pages import ROOT, Block, blocks, inline_code, pages

SHELL = ("sh", "bash", "")
LIBRARY = ("generate", "export", "compare", "dial", "dashboard", "rewind", "trace")
PLACEHOLDER = "FILE"
REAL_OVERRIDE = options.override


def lines(block: Block) -> list[str]:
    """The commands of a shell block: comments and variables before them left out."""
    joined = block.text.replace("\\\n", " ").replace(".venv/bin/", "")
    return [re.sub(r"^(?:\w+=\S* +)+", "", line) for line in joined.splitlines()]


def ours() -> list[tuple[str, str]]:
    """(where, command) of every `ponente`, `python` and `make` line, and of those in the text."""
    found = []
    for page in pages():
        for block in blocks(page):
            if block.language in SHELL:
                found += [(block.where, line) for line in lines(block)]
        found += [(page.name, code) for code in inline_code(page) if code.startswith("ponente ")]
    wanted = r"ponente [a-z]|ponente --version|python (-m tests\.|-m steps\.|\S+\.py)|make( |$)"
    return sorted({(where, line) for where, line in found if re.match(wanted, line)})


@functools.cache
def experiment(file: str) -> Declaration[Any] | None:
    """The experiment of a file; of those that the pages themselves write, from their block."""
    if file == PLACEHOLDER:
        return experiment("experiments/run_200m.py")
    if (ROOT / file).exists():
        return load_experiment(str(ROOT / file))
    for page in pages():
        for block in blocks(page):
            if block.language == "python" and block.text.startswith(f'"""{file}: '):
                module = types.ModuleType(file.removesuffix(".py"))
                module.__file__ = file
                sys.modules[module.__name__] = module  # where tyro looks a class up
                exec(compile(block.text, block.where, "exec"), vars(module))
                return vars(module)["experiment"]
    raise AssertionError(f"{file}: neither a file nor a block that begins with its name")


def check(command: str) -> None:
    """Raise where a command's program, verb, file or flags do not exist."""
    first, *words = shlex.split(command.partition(" | ")[0].partition(" > ")[0], comments=True)
    if first == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wrong = [w for w in words if "=" not in w and not w.startswith("-") and w not in targets]
        assert not wrong, f"no target {wrong}"
    elif first == "python" and words[0] == "-m":
        _module(words[1], words[2:])
    elif first == "python":
        given = words[1:]
        verb = given[0] if given and given[0] in verbs.VERBS else "run"
        _verb(verb, experiment(words[0]), given[1:] if given[:1] == [verb] else given)
    else:
        _ponente(words)


def _module(name: str, flags: list[str]) -> None:
    base = ROOT.joinpath(*name.split("."))
    file = next(f for f in (base.with_suffix(".py"), base / "__main__.py") if f.exists())
    source = file.read_text() + (ROOT / "tests" / "bench" / "tpu_options.py").read_text()
    for flag in (flag.partition("=")[0] for flag in flags if flag.startswith("--")):
        assert f'"{flag}"' in source or flag == "--help", f"{name}: no {flag}"


def _ponente(words: list[str]) -> None:
    refuse_secrets(words)
    verb, *rest = words
    if verb in ("completion", "--version", "VERB"):
        return
    if verb not in ("join", *LIBRARY, *verbs.VERBS):
        raise AssertionError(f"no verb {verb}")
    if "--help" in rest or not rest:
        return
    if verb == "join":
        end = rest.index("--") if "--" in rest else len(rest)
        launch._parser().parse_args(rest[:end])
        if after := rest[end + 1 :]:
            check(shlex.join(after).replace(".venv/bin/", ""))
        return
    if verb == "compare":
        assert {w for w in rest if w.startswith("-")} <= {"--output", "--forecasts"}
    elif verb in LIBRARY:
        parsers = {"generate": generate, "export": export, "dial": dial, "dashboard": dashboard}
        parsers |= {"rewind": rewind, "trace": trace_document}
        parsers[verb]._parser().parse_args(rest)
    else:
        file = next((word for word in rest if word.endswith(".py") or word == PLACEHOLDER), None)
        _verb(verb, experiment(file) if file else None, [word for word in rest if word != file])


def _verb(verb: str, of: Declaration[Any] | None, arguments: list[str]) -> None:
    arguments = [word for word in arguments if word not in ("--help-settings", "...")]
    flags, *_ = options.parse(verb, arguments, None if verb in verbs.FREE else of, verb)
    if verb == "launch" and flags.on in TARGETS:
        assert not storage.is_local(flags.prefix), "launch: every host must reach the store"
        assert flags.zone or flags.zones or flags.on == "sky", "launch: give --zone"


@pytest.mark.slow
def test_commands_parse(values_later):
    """Verbs exist, and the flags are their own, the experiment's or a preset's; so do values."""
    commands = ours()
    assert len(commands) > 150
    wrong = []
    for where, command in commands:
        try:
            check(command)
        except (AssertionError, PonenteError, SystemExit) as error:
            wrong.append((where, command, str(error)))
    assert wrong == []
    for settings, flags in values_later.values():
        REAL_OVERRIDE(settings, [word for flag in flags.values() for word in flag], "docs")


@pytest.fixture
def values_later(monkeypatch):
    """The first value of each setting's flag, by the class of the settings.

    tyro takes a tenth of a second for each call, so commands are not parsed by it one by one.
    """
    found: dict[type, tuple[Any, dict[str, list[str]]]] = {}

    def record(settings: Any, overrides: list[str], prog: str) -> Any:
        del prog
        _, flags = found.setdefault(type(settings), (settings, {}))
        starts = [i for i, word in enumerate(overrides) if word.startswith("--")]
        for start, end in itertools.pairwise([*starts, len(overrides)]):
            flags.setdefault(overrides[start], overrides[start:end])
        return settings

    monkeypatch.setattr(options, "override", record)
    return found


def test_dotted_flags_in_the_text_exist():
    """Settings of an experiment that stand in backticks by themselves."""
    known = {*options.dotted(experiment(PLACEHOLDER).presets["full"])}
    wanted = re.compile(r"(--(?:model|optimizer|training)\.[\w.-]+)")
    found = {m[1] for page in pages() for code in inline_code(page) if (m := wanted.match(code))}
    assert "--training.microbatches" in found
    assert found - known == set()


@pytest.mark.parametrize(
    "command",
    [
        "ponente play experiments/run_200m.py",
        "ponente plays",
        "ponente join head:6380 -- ponente play experiments/run_200m.py",
        "ponente plan experiments/run_200m.py --smokes",
        "ponente plan experiments/run_200m.py --training.batch 8",
        "ponente status FILE --follow",
        "ponente export runs/x --to onnx",
        "ponente plan experiments/run_200m.py --hub-token x",
        "ponente launch FILE --on sky",
        "ponente launch FILE --on queued --prefix gs://bucket/runs",
        "python experiments/none.py",
        "python -m tests.bench.plans --writes",
        "make sites",
    ],
)
def test_the_check_can_fail(command):
    """Verbs, presets, settings, flags, files, modules and targets are each looked up."""
    with pytest.raises((AssertionError, PonenteError, SystemExit)):
        check(command)
