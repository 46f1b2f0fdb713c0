"""A headless Chromium, driven over a pipe by its own protocol: what does a browser show?"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *(
        "--no-first-run",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--disable-extensions",
    ),
)


class Browser:
    """A context with one page; what its console and its policies report is in `problems`."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        self._size = width, height
        ours, theirs = os.pipe(), os.pipe()
        assert CHROMIUM is not None
        # It reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        flags = (*_FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank")
        self._process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, *flags],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0]), os.close(theirs[1])
        self._out, self._in, self._rest = ours[1], theirs[0], b""
        self._ids, self.problems = itertools.count(1), []
        self._session = None

    def __enter__(self) -> Browser:
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(each for each in targets if each["type"] == "page")
        found = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.resize(*self._size)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out), os.close(self._in)

    def ask(self, method: str, **parameters):
        """The result of a command of the protocol."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(text)
        if answer.get("method") == "Log.entryAdded":
            entry = answer["params"]["entry"]
            self.problems += [entry["text"]] if entry["level"] in ("error", "warning") else []
        if answer.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(answer["params"]["exceptionDetails"]))
        return answer

    def resize(self, width: int, height: int) -> None:
        how = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **how)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        self.until("location.href !== 'about:blank'")

    def run(self, expression: str):
        """The value of an expression in the page."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 20.0) -> None:
        """Return once an expression is true in the page, and the page has loaded."""
        end = time.monotonic() + seconds
        while not self._holds(f"document.readyState === 'complete' && ({expression})"):
            assert time.monotonic() < end, f"not within {seconds} s: {expression}"
            time.sleep(0.1)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.run(expression))
        except AssertionError:  # a page that is being left answers with an error
            return False

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A screenshot as PNG: of the whole page, or of what the window shows."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
