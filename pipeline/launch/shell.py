"""The shell of a launched machine: install the code, join, and give back what is rented.

The head requests the chips itself, under a trap that deletes them: they do not exist before the
trap does, and are deleted until a listing confirms it, whatever fails. It is the last to delete
itself. A host restarts `join` while it may be needed. Where it no longer is (the run ended, it
cannot be set up, or no head answers for `_WAIT`), its slice is useless too, so the host deletes the
chips: also where the head was killed.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pipeline.launch.job import Job

PORT = 6380  # SkyPilot runs its own Ray at the default port 6379
_WAIT = "20m"  # machines that exist are billed; hosts of a slice boot within minutes of each other
_QUEUE = "48h"  # waiting for chips costs nothing

# The Ubuntu 22.04 of TPU images has Python 3.10, and its package archive 3.11. After a boot,
# Ubuntu's own updates hold apt's lock for minutes.
SETUP = """\
command -v python3.11 || {
  apt="sudo apt-get -q -y -o DPkg::Lock::Timeout=600"
  $apt update && $apt install python3.11 python3.11-venv make
} && make setup PYTHON=python3.11
"""
LOST = "75"  # the status of `join` on a host that lost its Ray or the head
# 129 and more: a signal ended it, as when the machine shuts down, to boot again.
_LOST_OR_KILLED = f"{LOST} | 129 | 1[3-9]?"

_MACHINE = """\
#!/bin/bash
%(origin)sset -u -o pipefail
chips() { %(listed)s; }
report() { timeout 5m gcloud storage cp %(disk)s.log "%(folder)s/$HOSTNAME.log"; }
give_back() {
  report
  until
    %(delete)s
    sleep 10  # a request that was interrupted may be listed late
    left=$(chips) && ! grep -qxF %(name)s <<< "$left"
  do echo "%(name)s is not deleted yet; trying again"; done
  echo "%(name)s is deleted"
}
again() {
  for pause in 10 30 90; do
    "$@" && return
    echo "failed: $*; again in $pause s"
    sleep $pause & wait $!  # a signal need not wait for it
  done
  "$@"
}
enter() { mkdir -p %(disk)s && cd %(disk)s && exec >> %(disk)s.log 2>&1 && date; }
install() { timeout 15m bash -o pipefail -c %(install)s; }
"""
# From when there are chips, which are billed, a host has 2400 seconds to join.
_HEAD = """\
request() { chips | grep -xF %(name)s || %(create)s; }
run=''; watch=''; stopped=''
end() {
  trap '' HUP INT TERM
  [ -z "$watch" ] || kill "$watch"
  [ -z "$run" ] || { kill "$run" && wait "$run"; }  # it saves a checkpoint
  give_back
  report
  [ -z "$stopped" ] || return  # this machine may boot again, and then goes on
  touch %(disk)s.ended
  until %(delete_head)s; do sleep 60; done
}
trap end EXIT
trap 'stopped=yes; exit 143' HUP INT TERM
enter && [ ! -e %(disk)s.ended ] && again install && again request || exit
%(join)s &
run=$!
{
  until %(exist)s; do sleep 60; done
  sleep 2400
  grep -q " joined: " %(disk)s.log || { echo "no host joined in time"; kill "$run"; }
} &
watch=$!
wait "$run"
code=$?
run=''
exit $code
"""


@dataclass(frozen=True)
class Chips:
    """Commands for the machines with chips, which all have the job's name.

    Attributes:
        create: requests them.
        exist: succeeds once there are some, which are billed, and not only a request.
        listed: prints the names of requests and machines.
        delete: deletes them.
    """

    create: str
    exist: str
    listed: str
    delete: str


def join(job: Job, head: str, *flags: str) -> str:
    """The command with which a host joins the cluster of a head: its name as a shell reads it."""
    words = [f'.venv/bin/ponente join "{head}:{PORT}" --hardware {job.hardware.name}']
    words += [f"--name {job.name} --wait {_WAIT}", f"--shared {job.folder}/secret", *flags]
    return f"{' '.join(words)} -- .venv/bin/{shlex.join(job.command)}"


def joined(command: str, again: str) -> str:
    """Shell that repeats a `join` while it ends with one of the statuses `again`."""
    return f"""\
while :; do
  {command}
  code=$?
  case $code in {again}) sleep 10 ;; *) break ;; esac
done
"""


def scripts(job: Job, chips: Chips) -> dict[str, str]:
    """Startup scripts of the head and the hosts, by file name; they run at every boot."""
    install = f"gcloud storage cp {job.bundle} - | tar -xzf - || exit\n{SETUP}"
    values = {
        **vars(chips),
        "origin": job.origin(),
        "name": job.name,
        "folder": job.folder,
        "disk": f"/opt/{job.name}",
        "install": shlex.quote(install),
        "delete_head": delete_head(job),
        "join": join(job, head_name(job), f"--queue {_QUEUE}", "--role head"),
    }
    loop = joined(join(job, head_name(job), "--role host"), _LOST_OR_KILLED)
    return {
        f"{job.name}.head.sh": (_MACHINE + _HEAD) % values,
        f"{job.name}.host.sh": _MACHINE % values + f"enter && again install && {loop}give_back\n",
    }


def head_name(job: Job) -> str:
    """The name of the head's machine."""
    return f"{job.name}-head"


def delete_head(job: Job) -> str:
    """The command that deletes the head's machine."""
    return f"gcloud compute instances delete {head_name(job)} --zone={job.zone} --quiet"
