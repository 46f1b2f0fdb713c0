"""Shell commands of every host: install the locked environment, then `join`."""

from __future__ import annotations

import shlex

from pipeline.launch.job import Job

PORT = 6380  # SkyPilot runs its own Ray at the default port 6379
WAIT = "20m"  # hosts of a slice boot within minutes of each other
QUEUE = "48h"  # the head starts first and waits for chips

# The Ubuntu 22.04 of TPU images has Python 3.10, and its package archive 3.11.
SETUP = """\
if ! command -v python3.11; then
  sudo apt-get -q update
  sudo apt-get -q -y install python3.11 python3.11-venv make
fi
make setup PYTHON=python3.11
"""


def join(job: Job, head: str, *flags: str, wait: str = WAIT) -> str:
    """The command with which a host joins the cluster whose head is `head`.

    Args:
        job: the job to launch.
        head: host name or address, as a shell reads it.
        flags: more flags of `join`.
        wait: how long to wait for the head, or as the head for the hosts.
    """
    words = [f'.venv/bin/ponente join "{head}:{PORT}" --hardware {job.hardware.name}']
    words += [f"--name {job.name} --wait {wait}", f"--shared {job.folder}/secret", *flags]
    return f"{' '.join(words)} -- .venv/bin/{shlex.join(job.command)}\n"
