"""How a real browser shows the page of a run."""

from __future__ import annotations

import pytest

from tests.pipeline.execute import run_logs
from tests.pipeline.execute.run_logs import key
from tests.pipeline.pages import browser, pages
from tests.pipeline.pages.pages import overlaps, written


@pytest.fixture
def troubled(tmp_path):
    return pages.troubled(str(tmp_path))


BOXES = """{
  ready: document.documentElement.dataset.ready,
  requests: performance.getEntriesByType('resource').map(e => e.name),
  open: [...document.querySelectorAll('.panel')].filter(p => getComputedStyle(p).display != 'none')
    .map(p => p.innerText),
  boxes: [...document.querySelectorAll('.dag .box .body')].map(b => b.getBoundingClientRect())
    .map(r => [r.x, r.y, r.width, r.height]),
  clear: [...document.querySelectorAll('.dag .box:not(.faint) title')].map(t => t.textContent),
  edges: document.querySelectorAll('.dag .edge.on').length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  spilled: [...document.querySelectorAll('.dag:not(.many) .box')].filter(b =>
    [...b.querySelectorAll('text')].some(t => t.getBoundingClientRect().right >
      b.querySelector('.body').getBoundingClientRect().right)).map(b => b.textContent),
  focus: document.activeElement.id}"""


@pytest.mark.slow
def test_a_browser_shows_twenty_boxes_apart(tmp_path):
    """No script error, no request, boxes that do not overlap, no text outside its box."""
    run_logs.large_run(str(tmp_path), "twenty", 20)
    path, _ = written(tmp_path, "twenty")
    seen = browser.ask(path, BOXES)
    assert seen["errors"] == []
    value = seen["value"]
    assert value["ready"] == "yes"
    assert value["requests"] == []
    assert len(value["boxes"]) == 20
    assert all(w > 50 and h > 20 for _, _, w, h in value["boxes"])
    assert overlaps(value["boxes"]) == []
    assert value["spilled"] == []
    assert value["open"] == []
    assert value["overflow"] == 0


@pytest.mark.slow
def test_the_address_opens_a_panel_and_lights_the_lineage(troubled):
    """`#step=KEY` shows one panel with the right words and dims what is not of its lineage."""
    path, _ = troubled
    seen = browser.ask(path, BOXES, f"#step={key('tokenize_validation')}")
    assert seen["errors"] == []
    value = seen["value"]
    (panel,) = value["open"]
    assert "3 documents were <empty>" in panel
    assert key("tokenize_validation") in panel
    assert value["focus"] == f"step={key('tokenize_validation')}"
    up = {"documents", "train_tokenizer"}
    down = {"train", "evaluate", "sample", "export", "report"}
    assert {t.split(":")[0] for t in value["clear"]} == up | down | {"tokenize_validation"}
    assert value["overflow"] == 0


@pytest.mark.slow
def test_keys_clicks_and_filters_work(troubled):
    """A click opens a panel, Escape closes it, a legend entry and a search dim the others."""
    path, _ = troubled
    script = """(() => {
      const seen = {}, clear = () => document.querySelectorAll('.box:not(.faint)').length;
      const find = document.getElementById('find');
      document.querySelector('.key.failed').click(); seen.failed = clear();
      document.querySelector('.key.failed').click(); seen.all = clear();
      find.value = 'TOKENIZE'; find.oninput(); seen.found = clear();
      find.value = ''; find.oninput();
      const width = () => document.querySelector('.dag').getBoundingClientRect().width;
      const before = width();
      document.getElementById('larger').click(); seen.grown = width() / before;
      document.querySelector('.box.failed').dispatchEvent(new MouseEvent('click', {bubbles: true}));
      seen.hash = location.hash;
      return seen; })()"""
    seen = browser.ask(path, script)
    assert seen["errors"] == []
    assert seen["value"]["failed"] == 1
    assert seen["value"]["all"] == 10
    assert seen["value"]["found"] == 3  # and train_tokenizer
    assert seen["value"]["grown"] == pytest.approx(1.25, rel=0.01)
    assert seen["value"]["hash"] == f"#step={key('evaluate')}"
    script = """(() => { dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
      return location.hash; })()"""
    assert browser.ask(path, script, f"#step={key('train')}")["value"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1400])
def test_a_thousand_steps_in_a_browser(tmp_path, width):
    """All there, apart, none wider than the window; a picked step shows its edges only."""
    run_logs.large_run(str(tmp_path), "large", 1000)
    path, _ = written(tmp_path, "large")
    seen = browser.ask(path, BOXES, f"#step={key('train rate 005')}", width)
    assert seen["errors"] == []
    value = seen["value"]
    assert len(value["boxes"]) == 1000
    assert overlaps(value["boxes"]) == []
    assert len(value["open"]) == 1
    assert value["edges"] == 2 * 10 + 1  # ten parts, their sources, and the table
    assert value["overflow"] == 0


@pytest.mark.slow
def test_pictures_of_the_page_in_light_and_dark(troubled, tmp_path):
    """Not blank: the colours of the states are there, and dark is darker than light."""
    from matplotlib.image import imread

    path, _ = troubled
    light = imread(browser.screenshot(path, tmp_path / "light.png"))[..., :3]
    dark = imread(browser.screenshot(path, tmp_path / "dark.png", "", browser.DARK))[..., :3]
    assert light.mean() > 0.85 > 0.3 > dark.mean()
    for picture, state, colour in (
        (light, "executed", (0x2B, 0x6C, 0xB0)),
        (light, "failed", (0xC5, 0x30, 0x30)),
        (light, "elsewhere", (0x76, 0x55, 0xB5)),
        (dark, "failed", (0xFC, 0x81, 0x81)),
    ):
        near = abs(picture * 255 - colour).max(-1) < 3
        assert near.sum() > 100, state
