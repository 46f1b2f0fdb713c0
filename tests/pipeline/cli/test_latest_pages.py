"""The short paths that lead to the pages of an experiment's targets."""

from __future__ import annotations

import pytest

from pipeline import Artifact, Experiment, Result, StepContext, step
from pipeline.store import storage
from tests.pipeline.pages.pages import Page
from tests.pipeline.toy import Numbers, numbers


class Book(Artifact):
    """One page."""

    @property
    def page(self) -> str:
        return storage.join(self.shard("page"), "index.html")


@step(output=Book, version=1)
def book(
    run: StepContext, numbers: Numbers, *, text: str = "<head></head><a href='other'>"
) -> Result:
    with run.shard("page") as directory:
        storage.write_atomic(storage.join(directory, "index.html"), text.encode())
    return {}


def test_two_pages_of_one_label_have_a_path_each(tmp_path, ponente):
    """In the order of the targets; a second run writes the same paths. Each opens alone, as a copy.

    Its relative links lead to where the page lies.
    """

    def two():
        return book(numbers(count=3)), book(numbers(count=4))

    reports = tmp_path / "store" / "reports" / "two"
    for _ in range(2):
        out = ponente(experiment=Experiment(two))[1]
        found = [path.read_text() for path in (reports / "book.html", reports / "book-2.html")]
        assert len(set(found)) == 2
        for text in found:
            (base,) = Page(text).all("base")
            assert text == f"<head><base href=\"{base['href']}\"></head><a href='other'>"
            assert (reports / base["href"]).read_text() == text.replace(
                f'<base href="{base["href"]}">', ""
            )
        assert all(str(reports / name) in out for name in ("book.html", "book-2.html"))
    assert len(list(reports.iterdir())) == 2


@pytest.mark.parametrize("text", ["<html><img src='a.png'>", '<head></head><a href="#end">'])
def test_a_page_that_a_base_would_break_is_led_to(tmp_path, ponente, text):
    """Without a head, or with links into itself."""

    def one():
        return book(numbers(count=3), text=text)

    ponente(experiment=Experiment(one))
    reports = tmp_path / "store" / "reports" / "one"
    (link,) = Page((reports / "book.html").read_text()).all("a")
    assert (reports / link["href"]).read_text() == text


def test_the_pages_of_a_run_lead_to_those_of_its_targets(tmp_path, ponente):
    """The table of runs and the run's own page, by the label, relative to the store."""

    def one():
        return book(numbers(count=3))

    ponente(experiment=Experiment(one))
    reports = tmp_path / "store" / "reports"
    for name in ("index.html", next(reports.glob("2*.html")).name):
        links = Page((reports / name).read_text()).all("a", href="../reports/one/book.html")
        assert [link["text"] for link in links] == ["book"]
