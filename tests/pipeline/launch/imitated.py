"""Imitated tools on a PATH of their own, which record their calls and fail on demand.

`gcloud` keeps whether the chips exist. `.venv/bin/ponente`, part of the code that is sent, ends
with the statuses in the file `statuses`, one after the other; "stay" stays until a signal comes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

TOOL = r"""#!/bin/bash
call="${0##*/} $*"
echo "$call" >> "$LAB/calls"
for rule in "$LAB"/fail/*; do
  [ -e "$rule" ] || continue
  { read -r times; read -r pattern; } < "$rule"
  if [[ $call == $pattern ]] && [ "$times" -gt 0 ]; then
    printf '%s\n' "$((times - 1))" "$pattern" > "$rule"
    exit 1
  fi
done
case $call in
  "gcloud storage cp gs:"*" -") cat "$LAB/code.tar.gz" ;;
  "gcloud storage cp "*.log*)
    while [ -e "$LAB/hangs" ]; do read -r -t 0.05 <> <(:); done
    cp "$3" "$LAB/uploaded.log" ;;
  "gcloud compute "*" managed create "* | "gcloud compute tpus queued-resources create "*)
    [ ! -e "$LAB/chips" ] && touch "$LAB/chips" ;;
  "gcloud compute "*" managed delete "* | "gcloud compute tpus queued-resources delete "*)
    rm "$LAB/chips" ;;
  "sleep 2400")  # nobody waits for it after the test
    for ((n = 0; n < 100; n++)); do
      [ -e "$LAB/late" ] && [ -e "$LAB/stays" ] && exit  # what is killed has its trap by then
      read -r -t 0.05 <> <(:)
    done
    echo "host 0 of 4 joined: vm" >> "$LAB/opt/run-200m.log" ;;
  "gcloud compute "*" list-instances "*) [ -e "$LAB/chips" ] && echo RUNNING ;;
  "gcloud compute "*" queued-resources describe "*) [ -e "$LAB/chips" ] && echo ACTIVE ;;
  "gcloud compute "*" list "*) if [ -e "$LAB/chips" ]; then echo other; echo run-200m; fi ;;
esac
"""
PONENTE = r"""#!/bin/bash
echo "ponente $*" >> "$LAB/calls"
status=$(head -n 1 "$LAB/statuses")
sed -i 1d "$LAB/statuses"
if [ "$status" = stay ]; then
  trap 'echo saved >> "$LAB/calls"; exit 130' TERM
  touch "$LAB/stays"
  while [ -e "$LAB/stays" ]; do read -r -t 0.05 <> <(:); done
fi
exit "$status"
"""
IMITATED = ("gcloud", "make", "sudo", "sleep", "sky", "kubectl", "docker")
REAL = ("bash", "cat", "cp", "date", "grep", "gzip", "head", "mkdir", "rm", "sed", "tar")
REAL += ("timeout", "touch")


class Lab:
    """A folder with the tools, what they remember, and the machine's disk."""

    def __init__(self, folder: Path, *statuses: int | str) -> None:
        self.folder = folder
        for name in ("bin", "fail", "opt", "code/.venv/bin"):
            (folder / name).mkdir(parents=True)
        for name in IMITATED:
            self._write(folder / "bin" / name, TOOL)
        for name in REAL:
            (folder / "bin" / name).symlink_to(str(shutil.which(name)))
        self._write(folder / "code/.venv/bin/ponente", PONENTE)
        with tarfile.open(folder / "code.tar.gz", "w:gz") as archive:
            archive.add(folder / "code", ".")
        self.end_with(*statuses)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def end_with(self, *statuses: int | str) -> None:
        (self.folder / "statuses").write_text("".join(f"{status}\n" for status in statuses))

    def fail(self, pattern: str, times: int = 1000) -> None:
        """Let the next calls that match a shell pattern fail."""
        rule = self.folder / "fail" / str(len(os.listdir(self.folder / "fail")))
        rule.write_text(f"{times}\n{pattern}\n")

    def start(self, script: str) -> subprocess.Popen[bytes]:
        """Run a script as the machine's; its /opt and home are in this folder."""
        path = self.folder / "script.sh"
        path.write_text(script.replace("/opt/", f"{self.folder}/opt/"))
        environment = {"PATH": str(self.folder / "bin"), "LAB": str(self.folder)}
        environment |= {"HOME": str(self.folder / "opt"), "HOSTNAME": "machine"}
        return subprocess.Popen(["bash", str(path)], env=environment, cwd=self.folder)

    def run(self, script: str) -> int:
        return self.start(script).wait(20)

    def stopped(self, script: str, number: signal.Signals) -> int:
        """Run a script until its `ponente` stays, send a signal, and return its status."""
        process = self.start(script)
        while not (self.folder / "stays").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        status = process.wait(20)
        (self.folder / "stays").unlink()
        return status

    @property
    def chips(self) -> bool:
        return (self.folder / "chips").exists()

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def count(self, word: str) -> int:
        return sum(word in call for call in self.calls)

    @property
    def log(self) -> str:
        return (self.folder / "uploaded.log").read_text()
