"""A real headless browser for tests of pages, without any package: its command line is enough."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DARK = "--blink-settings=preferredColorScheme=0"


def executable() -> str:
    """Path of a Chromium; skips the test where there is none."""
    named = os.environ.get("PONENTE_BROWSER")
    found = named or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} on PATH, PONENTE_BROWSER not set")
    return found


def _run(page: str, folder: Path, *flags: str) -> bytes:
    command = [
        executable(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=3000",
        *flags,
        page,
    ]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout


class _Probe(HTMLParser):
    """Finds the text of the element that a probe wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.text = False, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = ("id", "probe") in attrs

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside else ""


def ask(page: Path, script: str, fragment: str = "", width: int = 1400, *flags: str) -> Any:
    """What the JavaScript expression `script` gives in the opened page, 500 ms after loading.

    The result has `errors` (messages of scripts that failed) beside `value`.
    """
    before = "<script>const errors=[];addEventListener('error',e=>errors.push(e.message))</script>"
    probe = (
        "<script>addEventListener('load',()=>setTimeout(()=>{const value=(" + script + ");"
        "const out=document.createElement('pre');out.id='probe';"
        "out.textContent=JSON.stringify({value,errors});document.body.append(out)},500))</script>"
    )
    text = page.read_text()
    assert text.count("<head>") == 1
    assert text.endswith("</body></html>\n")
    copy = page.with_name(f"probe-{page.name}")
    copy.write_text(
        text.replace("<head>", "<head>" + before)[: -len("</body></html>\n")]
        + probe
        + "</body></html>"
    )
    flags = (*flags, f"--window-size={width},1000", "--dump-dom")
    dumped = _run(copy.as_uri() + fragment, page.parent, *flags).decode()
    parser = _Probe()
    parser.feed(dumped)
    return json.loads(parser.text)


def screenshot(page: Path, image: Path, fragment: str = "", *flags: str) -> Path:
    """A picture of the page in a window of 1200 x 900."""
    flags = (*flags, "--window-size=1200,900", f"--screenshot={image}")
    _run(page.as_uri() + fragment, page.parent, *flags)
    return image
