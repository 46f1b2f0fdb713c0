"""`launch`: print or run the commands that make an experiment's machines, or imitate them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from pipeline.cli import options
from pipeline.cli.context import Context, file_among, say
from pipeline.errors import InputError, UsageError
from pipeline.graph.declaration import FULL
from pipeline.graph.hardware import Hardware
from pipeline.launch import LOCAL, gcloud, kuberay, shipped, sky
from pipeline.launch.job import FOLDER, Job, Provisioning, hardware_of, job_name
from pipeline.store.write_check import bucket_warnings

BACK_ENDS = {
    "sky": sky.provision,
    "kuberay": kuberay.provision,
    "gcloud": gcloud.group,
    "queued": gcloud.queued,
}


def launch(context: Context) -> int:
    """Print the files and commands that make machines and run the experiment on them.

    With --go they are executed. `--on local` costs nothing and runs without --go.
    """
    chosen = context.options
    if not chosen.on:
        raise UsageError(f"launch: give --on, one of {', '.join((*BACK_ENDS, LOCAL))}")
    assert context.experiment is not None
    name = job_name(context.experiment.name, context.preset)
    hardware = hardware_of(context.targets)
    if chosen.on == LOCAL:
        return _local(context, hardware, name)
    command, files = _run_command(context), shipped.listed()
    if (script := command[2].partition(":")[0]) not in files:
        raise InputError(
            f"launch: git ignores {script}, so hosts would not get it; git add -f {script}"
        )
    job = Job(
        name=name,
        hardware=hardware,
        command=command,
        prefix=context.store.prefix,
        code=shipped.digest(files),
        spot=chosen.spot,
        zone=chosen.zone,
        image=chosen.image,
    )
    made = BACK_ENDS[chosen.on](job)
    for warning in bucket_warnings(job.prefix, job.region):
        say(f"warning: {warning}", error=True)
    if not chosen.go:
        for file, text in made.files.items():
            say(f"==> {FOLDER}/{file}\n{text}")
        say("\n".join(["==> commands, which --go runs", *made.commands, _later(made)]))
        say(f"==> {FOLDER}/{job.packed}: {len(files)} files that git would send, and their commit")
        return 0
    for program in made.needs:
        if shutil.which(program) is None:
            raise InputError(f"launch: {program} is not installed here, and --go calls it")
    os.makedirs(FOLDER, exist_ok=True)
    for file, text in made.files.items():
        Path(FOLDER, file).write_text(text)
    shipped.pack(os.path.join(FOLDER, job.packed), files, made.files)
    return _call(made)


def _run_command(context: Context) -> tuple[str, ...]:
    words = context.command[1:]
    # Last, because the first word may be the program's own file.
    (reference,) = file_among((*words[1:], *words))
    path, colon, variable = reference.partition(":")
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath("."))
    if relative.startswith(".."):
        raise InputError(f"launch: {path} is outside of this directory, which is copied to hosts")
    return ("ponente", "run", relative + colon + variable, *_flags(context))


def _flags(context: Context) -> list[str]:
    """Preset, settings, store and other flags of this command, for `run`."""
    _, rest = options.parser("launch", context.experiment).parse_known_args(context.command)
    words = rest[next((i for i, w in enumerate(rest) if w.startswith("--")), len(rest)) :]
    if context.preset != FULL:
        words = ["--preset", context.preset, *words]
    defaults = options.defaults("launch")
    for name in options.LAUNCHED:
        value = getattr(context.options, name)
        # A switch may be set by this machine's environment, which the hosts do not have.
        if value is True or value != getattr(defaults, name):
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(f"{value:.0f}s" if name == "wait" else ",".join(value))
    return [*words, "--prefix", context.store.prefix]


def _local(context: Context, hardware: Hardware, name: str) -> int:
    """Run the experiment on an imitated pod, with this process's interpreter and program."""
    from pipeline.launch.join import run_local

    # Such as [python, -m, module, launch, FILE, ...] or [python, FILE, launch, ...].
    typed = sys.orig_argv
    at = typed.index("launch")
    command = [sys.executable, *typed[1:at], "run", *file_among(typed[at:]), *_flags(context)]
    return run_local(hardware, name, command)


def _later(made: Provisioning) -> str:
    early = "# ends everything early; at the end of the run it is deleted without you:"
    return "\n".join(["==> later", early, *made.undo, *made.after])


def _call(made: Provisioning) -> int:
    undo = "; ".join(made.undo)
    for line in made.commands:
        say(f"$ {line}")
        left = "nothing was made that costs money"
        if line == made.commands[-1]:
            left = f"this ends what it made, and any earlier launch of this name: {undo}"
        try:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", line])
        except KeyboardInterrupt:
            say(f"launch: interrupted; {left}", error=True)
            raise
        if done.returncode:
            program = line.partition(" ")[0]
            raise InputError(f"launch: {program} ended with status {done.returncode}; {left}")
    say(_later(made))
    return 0
