"""`launch` prints or runs the commands that make machines; `join` makes one a cluster's host."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline.cli import options, verbs
from pipeline.cli.context import Context, file_among, say
from pipeline.errors import InputError, StoreUnavailable, UsageError
from pipeline.graph.declaration import FULL
from pipeline.graph.hardware import Hardware, pod
from pipeline.identity.secret_text import refuse_secrets
from pipeline.launch import LOCAL, gcloud, gcluster, kuberay, shipped, sky
from pipeline.launch import zones as try_zones
from pipeline.launch.job import FOLDER, PORT, Job, Provisioning, hardware_of, job_name
from pipeline.prices import VARIABLE
from pipeline.store import storage
from pipeline.store.write_check import bucket_warnings

_ABOUT_JOIN = """`ponente join`: make this machine a host of a cluster, however it was created.

The same line on every host:

ponente join HEAD:6380 --hardware v6e-16 -- ponente run experiments/run_200m.py --prefix gs://bucket/runs

HEAD is the name or address of one machine, which runs the command once all hosts have joined. Flags
that are not given are read from the environment and from the machine's metadata.
"""
BACK_ENDS = {
    "sky": sky.provision,
    "kuberay": kuberay.provision,
    "gcluster": gcluster.provision,
    "gcloud": gcloud.group,
    "queued": gcloud.queued,
}


def launch(context: Context) -> int:
    """Print, or with --go run, what makes machines and runs the experiment on them."""
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
    _check_queue(chosen)
    job = Job(
        name=name,
        hardware=hardware,
        command=command,
        prefix=context.store.prefix,
        code=shipped.digest(files),
        spot=chosen.spot,
        capacity=chosen.capacity,
        image=chosen.image,
    )
    jobs = [dataclasses.replace(job, zone=zone) for zone in chosen.zones or (chosen.zone,)]
    zones = {job.zone: BACK_ENDS[chosen.on](job) for job in jobs}
    made = zones[jobs[0].zone]
    for warning in {w: None for job in jobs for w in bucket_warnings(job.prefix, job.region)}:
        say(f"warning: {warning}", error=True)
    if not chosen.go:
        for file, text in made.files.items():
            say(f"==> {FOLDER}/{file}\n{text}")
        for zone, each in zones.items():
            where = f" in {zone}, until a zone gives the chips" if len(zones) > 1 else ""
            say("\n".join([f"==> commands, which --go runs{where}", *each.commands]))
            say(_later(each))
        say(f"==> {FOLDER}/{job.packed}: {len(files)} files that git would send, and their commit")
        return 0
    for program in made.needs:
        if shutil.which(program) is None:
            raise InputError(f"launch: {program} is not installed here, and --go calls it")
    os.makedirs(FOLDER, exist_ok=True)
    shipped.pack(os.path.join(FOLDER, job.packed), files, made.files)
    if not chosen.zones:
        _call(made)
    else:
        zone = try_zones.first_given(zones, _call, chosen.zone_wait, say)
        say(f"the machines are in {zone}")
        made = zones[zone]
    say(_later(made))
    return 0


def _check_queue(chosen: argparse.Namespace) -> None:
    if chosen.zone and chosen.zones:
        raise UsageError("launch: give --zone or --zones")
    if chosen.spot and chosen.capacity:
        raise UsageError(f"launch: give --spot or --capacity {chosen.capacity}")
    for flag in ("zones", "capacity"):
        if getattr(chosen, flag) and chosen.on != "queued":
            raise UsageError(
                f"launch: --{flag} is about Google's queues; use --on queued (--on sky tries zones "
                "by itself)"
            )


def _run_command(context: Context) -> tuple[str, ...]:
    words = context.command[1:]
    # Last, because the first word may be the program's own file.
    (reference,) = file_among((*words[1:], *words))
    path, colon, variable = reference.partition(":")
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath("."))
    if relative.startswith(".."):
        raise InputError(f"launch: {path} is outside of this directory, which is copied to hosts")
    if local := [url for url in context.store.shared if storage.is_local(url)]:
        raise InputError(
            f"launch: hosts read the stores of --shared too, and {local[0]} is on this machine; "
            "give URLs such as gs://bucket/dir"
        )
    budget = context.options.budget
    if budget is not None and budget.dollars is not None and os.environ.get(VARIABLE):
        raise InputError(
            f"launch: hosts do not have the prices that {VARIABLE} names here, so --budget "
            f"{budget} would be another amount there; give a time such as --budget 3h"
        )
    return ("ponente", "run", relative + colon + variable, *_flags(context))


def _flags(context: Context) -> list[str]:
    """Preset, settings, store and other flags of this command, for `run`."""
    words = [] if context.preset == FULL else ["--preset", context.preset]
    words += context.options.overrides
    defaults = options.defaults("launch")
    for name in verbs.LAUNCHED:
        value = getattr(context.options, name)
        # A switch may be set by this machine's environment, which the hosts do not have.
        if value is True or value != getattr(defaults, name):
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                own = {"wait": lambda seconds: f"{seconds:.0f}s", "budget": str}
                words.append(own.get(name, ",".join)(value))
    shared = ["--shared", ",".join(context.store.shared)] if context.store.shared else []
    return [*words, *shared, "--prefix", context.store.prefix]


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


def _call(made: Provisioning) -> None:
    for file, text in made.files.items():
        Path(FOLDER, file).write_text(text)
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


def join(arguments: list[str]) -> int:
    """Make this machine a host of a cluster, until the run has ended; return its exit status."""
    refuse_secrets(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = _parser().parse_args(arguments[:end]), arguments[end + 1 :]
    from pipeline.launch import join as joining
    from pipeline.launch.host import check_chips, find

    head, only_head = _address(given.head), given.role == "head"
    if only_head and not given.hardware:
        raise UsageError("join: --role head needs --hardware, whose hosts it waits for")
    place = (given.hardware, given.worker_id, given.name, given.slice_id)
    host = None if only_head else find(*place)
    hardware = pod(given.hardware) if host is None else host.hardware
    if hardware.kind not in ("tpu", "gpu"):
        raise InputError(f"join: expected a TPU slice or hosts with GPUs, got {hardware.name!r}")
    try:
        secret = (
            joining.shared_secret(given.shared) if given.shared else os.environ.get(joining.SECRET)
        )
    except StoreUnavailable as error:
        say(f"error: {error}", error=True)
        return joining.LOST
    # Always set: by default a file in the user's home decides whether a new cluster requires a
    # token, and hosts could differ.
    os.environ["RAY_AUTH_MODE"] = "token" if secret else os.environ.get("RAY_AUTH_MODE", "disabled")
    os.environ |= {joining.SECRET: secret} if secret else {}
    if host is not None and not given.imitate:
        check_chips(host)
    more: dict[str, Any] = {"wait": given.wait, "imitate": given.imitate, "tell": say}
    if host is not None and (given.role == "host" or not joining.is_here(head[0], given.wait)):
        return joining.follow(head, host, **more)
    if not secret:
        say("warning: anyone who reaches this cluster's ports can run code; give --shared")
    queue = given.wait if given.queue is None else given.queue
    return joining.lead(head, host, hardware.processes, run=command, queue=queue, **more)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host, port = (host, port) if colon else (port, str(PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"join: expected HOST or HOST:PORT of the head, got {text!r}")
    return host, int(port)


def _parser() -> argparse.ArgumentParser:
    parser = options.UsageParser(
        prog="ponente join",
        usage="ponente join HEAD[:PORT] [flags] [-- COMMAND ...]",
        description=_ABOUT_JOIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, metavar: str | None, help: str, default: Any = "", **more: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=help, default=default, **more)

    add("head", None, f"the head's name or address; port {PORT} if none is given")
    add("--hardware", "NAME", "all hosts, such as v6e-16 or 2xv6e-16")
    add("--worker-id", "N", "number of this host in its slice, from 0")
    add("--slice-id", "N", "number of its slice, from 0, if there are several")
    add("--name", None, "name of the hardware, the same on all hosts")
    roles = "head: outside the slice; auto: a host, and also the head if HEAD is this machine"
    add("--role", None, roles, "auto", choices=("auto", "head", "host"))
    wait = "how long to wait for the head, or as the head for hosts while others are there (20m)"
    add("--wait", "TIME", wait, 1200.0, type=verbs.seconds)
    queue = "how long to wait as the head for the first host, as for chips; else as --wait"
    add("--queue", "TIME", queue, None, type=verbs.seconds)
    shared = "object that only these hosts can read; the first writes the cluster's secret to it"
    add("--shared", "URL", shared)
    parser.add_argument("--imitate", action="store_true", help="imitate the chips on CPUs")
    return parser
