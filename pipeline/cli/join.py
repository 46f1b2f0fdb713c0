"""`ponente join`: make this machine a host of a cluster, however it was created.

The same line on every host:

ponente join HEAD:6380 --hardware v6e-16 -- ponente run experiments/run_200m.py --prefix gs://bucket/runs

HEAD is the name or address of one machine, which runs the command once all hosts have joined. Flags
that are not given are read from the environment and from the machine's metadata.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from pipeline.cli.context import say
from pipeline.cli.options import UsageParser, seconds
from pipeline.errors import InputError, StoreUnavailable, UsageError
from pipeline.identity.secret_text import refuse_secrets

HELP = "make this machine a host of a cluster"
_PORT = 6380


def run(arguments: list[str]) -> int:
    refuse_secrets(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = _parser().parse_args(arguments[:end]), arguments[end + 1 :]
    from pipeline.graph.hardware import pod
    from pipeline.launch import join
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
        secret = join.shared_secret(given.shared) if given.shared else os.environ.get(join.SECRET)
    except StoreUnavailable as error:
        say(f"error: {error}", error=True)
        return join.LOST
    # Always set: by default a file in the user's home decides whether a new cluster requires a
    # token, and hosts could differ.
    os.environ["RAY_AUTH_MODE"] = "token" if secret else os.environ.get("RAY_AUTH_MODE", "disabled")
    os.environ |= {join.SECRET: secret} if secret else {}
    if host is not None and not given.imitate:
        check_chips(host)
    more: dict[str, Any] = {"wait": given.wait, "imitate": given.imitate, "tell": say}
    if host is not None and (given.role == "host" or not join.is_here(head[0])):
        return join.follow(head, host, **more)
    if not secret:
        say("warning: anyone who reaches this cluster's ports can run code; give --shared")
    queue = given.wait if given.queue is None else given.queue
    return join.lead(head, host, hardware.processes, run=command, queue=queue, **more)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host, port = (host, port) if colon else (port, str(_PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"join: expected HOST or HOST:PORT of the head, got {text!r}")
    return host, int(port)


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="ponente join",
        usage="ponente join HEAD[:PORT] [flags] [-- COMMAND ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, metavar: str | None, help: str, default: Any = "", **more: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=help, default=default, **more)

    add("head", None, f"the head's name or address; port {_PORT} if none is given")
    add("--hardware", "NAME", "all hosts, such as v6e-16 or 2xv6e-16")
    add("--worker-id", "N", "number of this host in its slice, from 0")
    add("--slice-id", "N", "number of its slice, from 0, if there are several")
    add("--name", None, "name of the hardware, the same on all hosts")
    roles = "head: outside the slice; auto: a host, and also the head if HEAD is this machine"
    add("--role", None, roles, "auto", choices=("auto", "head", "host"))
    wait = "how long to wait for the head, or as the head for hosts while others are there (20m)"
    add("--wait", "TIME", wait, 1200.0, type=seconds)
    queue = "how long to wait as the head for the first host, as for chips; else as --wait"
    add("--queue", "TIME", queue, None, type=seconds)
    shared = "object that only these hosts can read; the first writes the cluster's secret to it"
    add("--shared", "URL", shared)
    parser.add_argument("--imitate", action="store_true", help="imitate the chips on CPUs")
    return parser
