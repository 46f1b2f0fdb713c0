"""The dashboard in a real browser: it shows what the store has, and what the store gets later."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from pipeline.errors import StoreUnavailable
from tests.browser import CHROMIUM, Browser
from tests.pipeline.execute import run_logs
from tests.pipeline.pages.pages import RUN
from tests.steps.pages.test_live import TRAIN, append, serving, training

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
WIDTHS = (1280, 400)
HOSTILE = """<!doctype html><title>{title}</title><main></main><script>
document.title = 'ran';
const ended = text => () => document.title += text;
fetch('/reports/index.html').then(ended(' and read'), ended(' alone'));
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def store(tmp_path):
    """A run in progress whose training has five steps so far."""
    run_logs.troubled_run(str(tmp_path), RUN)
    log = run_logs.Log(str(tmp_path), "20270101-000000-live", time.time()).start(run_logs.graph())
    headline = {"status": "published", "result": {"headline": ["508 documents"]}}
    log.began("documents").tell("finished", "documents", seconds=1.0, **headline)
    log.tell("queued", "train").began("train").at(9)
    log.tell("progress", "train", done=5, total=9, unit="steps", note="loss 4.1")
    os.unlink(tmp_path / TRAIN / "manifest.json")
    training(tmp_path)
    return tmp_path, log


def unreachable(path, query):
    raise StoreUnavailable("the bucket does not answer")


def test_pages_grow_as_the_store_does(browser, store):
    """Without being loaded again; what was opened and the axes that were chosen stay."""
    prefix, log = store
    browser.problems.clear()
    with serving(prefix) as server:
        browser.open(server.url)
        assert browser.run("location.pathname") == "/reports/index.html"
        browser.run("window.loaded = true")
        assert "5 of 9 steps, loss 4.1" in browser.run("document.body.innerText")
        log.tell("progress", "train", done=6, total=9, unit="steps", note="loss 3.9")
        browser.until("document.body.innerText.includes('6 of 9 steps, loss 3.9')")
        assert browser.run("window.loaded"), "the page was not loaded again"

        browser.run("document.querySelector('td a').click()")
        browser.until("location.pathname.includes('live')")
        browser.run("document.querySelectorAll('details.step')[5].open = true")
        log.tell("warning", "train", message="a loss stood out")
        browser.until("document.body.innerText.includes('a loss stood out')")
        assert browser.run("document.querySelectorAll('details.step')[5].open")

        browser.run("[...document.links].find(each => each.textContent === 'curves').click()")
        browser.until(f"location.pathname === '/{TRAIN}/'")
        curve = "document.querySelector('.chart path.line').getAttribute('d')"
        before = browser.run(curve)
        browser.run("document.querySelector('.legend button').click()")
        pressed = "document.querySelector('.legend button').ariaPressed"
        assert browser.run(pressed) == "true", "the script of charts runs"
        append(prefix)
        browser.until(f"{curve}.split('L').length > {before.count('L') + 1}")
        assert browser.run(pressed) == "true"
        assert browser.run(f"{curve} !== {json.dumps(before)}")
        assert browser.problems == []
        good, server.pages = server.pages, unreachable
        browser.until("!document.querySelector('.late').hidden")
        late = browser.run("document.querySelector('.late').textContent")
        assert late.startswith("as of ")
        assert "the bucket does not answer" in late
        assert browser.run("!!document.querySelector('.chart')"), "what was there is still shown"
        server.pages = good
        browser.until("document.querySelector('.late').hidden")


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_their_window(browser, store, width):
    """Nothing is wider than the window but what scrolls by itself."""
    prefix, _ = store
    with serving(prefix) as server:
        browser.resize(width, 900)
        for path in ("", f"reports/{RUN}.html", f"{TRAIN}/", f"compare.html?run={TRAIN}"):
            browser.open(f"{server.url}{path}")
            assert browser.run("document.documentElement.scrollWidth") <= width, path


def test_scripts_that_are_not_ours_reach_nothing(browser, store):
    """A page of the store runs alone; what a run is called never runs."""
    prefix, log = store
    (prefix / "reports").mkdir(exist_ok=True)
    (prefix / "reports/team").mkdir()
    (prefix / "reports/team/page.html").write_text(HOSTILE.format(title="x"))
    log.tell("warning", "train", message="<script>document.title = 'ran'</script>")
    with serving(prefix) as server:
        browser.open(f"{server.url}reports/team/page.html")
        browser.until("document.title.startsWith('ran ')")
        assert browser.run("document.title") == "ran alone"
        browser.open(f"{server.url}reports/{log.run}.html")
        browser.run(
            "document.body.append(Object.assign(document.createElement('script'),"
            " { textContent: \"document.title = 'ran'\" }))"
        )
        assert browser.run("document.title") != "ran"
