"""A command in a session of its own, as a terminal starts one: on a real pty, or on a pipe.

`Screen` draws what a program wrote on a terminal of fixed size: the text that a person sees.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[3]
MARKER = "PONENTE_TEST_SESSION"
_CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Terminal:
    """A running command, what it says, and whoever it started; without `tty` on one pipe."""

    def __init__(self, command, environment=None, *, tty=True, rows=30, columns=100):
        self.rows, self.columns = rows, columns
        self._session = uuid.uuid4().hex
        self._data = bytearray()
        self._slave = None
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        settings = {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", MARKER: self._session}
        if tty:
            self._master, self._slave = pty.openpty()
            fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            self.modes = termios.tcgetattr(self._slave)
            output = self._slave
        else:
            self._master, output = os.pipe()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **settings, **(environment or {})},
            stdin=output if tty else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_take_terminal if tty else None,
        )
        if not tty:
            os.close(output)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        try:
            while data := os.read(self._master, 65536):
                self._data += data
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EBADF):
                raise

    @property
    def text(self):
        return bytes(self._data).decode(errors="replace")

    def screen(self):
        return Screen(self.rows, self.columns).feed(self.text)

    def interrupt(self):
        """What a terminal does on Ctrl-C: SIGINT for the whole foreground process group."""
        if self._slave is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
        else:
            os.write(self._master, b"\x03")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def hang_up(self):
        """The other end goes away: SIGHUP and EIO on a terminal, EPIPE on a pipe."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, self._master)  # the reader may be inside of a read of it
        os.close(null)

    def wait(self, seconds):
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        status = self.process.wait(seconds)
        time.sleep(0.1)  # for what is still on its way through the pty
        return status

    def modes_now(self):
        return termios.tcgetattr(self._slave)

    def left(self):
        """(pid, command) of every process of the session, or that was started by one of them."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError):
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
                fields = stat.rpartition(")")[2].split()
                marker = f"{MARKER}={self._session}".encode()
                ours = int(fields[3]) == self.process.pid
                if fields[0] not in "ZX" and (
                    ours or marker in Path(f"/proc/{name}/environ").read_bytes()
                ):
                    command = Path(f"/proc/{name}/cmdline").read_bytes()
                    found.append((int(name), command.replace(b"\0", b" ").decode()[:80]))
        return found

    def left_after(self, seconds):
        """`left`, once that many seconds have passed or nobody is left."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def close(self):
        for pid, _ in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self._slave is not None:
            os.close(self._slave)
        self._reader.join(5)
        os.close(self._master)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def _take_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Screen:
    """As much of a terminal as rich's live tables use; anything else is an error."""

    def __init__(self, rows, columns):
        self.rows, self.columns = rows, columns
        self.cursor = True
        self._lines = [""]
        self._row = self._column = 0

    def feed(self, text):
        """Draw all of it; returns the lines that are on the screen."""
        at = 0
        while at < len(text):
            found = _CONTROL.match(text, at)
            if found:
                self._control(*found.groups())
            else:
                self._put(text[at])
            at = found.end() if found else at + 1
        return [line.rstrip() for line in self._lines[-self.rows :]]

    def _put(self, character):
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        else:
            assert character.isprintable(), f"unexpected {character!r}"
            if self._column == self.columns:
                self._column = 0
                self._down()
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _down(self):
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")

    def _control(self, argument, command):
        if command == "A":
            # A terminal cannot go above its first row.
            top = max(0, len(self._lines) - self.rows)
            self._row = max(top, self._row - int(argument or 1))
        elif command == "K":
            assert argument == "2", f"unexpected erase {argument!r}"
            self._lines[self._row] = ""
        elif command in "lh":
            assert argument == "?25", f"unexpected mode {argument!r}"
            self.cursor = command == "h"
        else:
            assert command == "m", f"unexpected control {argument}{command}"
