"""Decisions of the named filters against datatrove's own objects, document by document."""

import dataclasses
import inspect
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("datatrove")

from datatrove.data import Document
from datatrove.pipeline import filters as datatrove

from data.prepare import filters as named
from data.prepare.filters import Filter, Language, Length, TerminalPunctuation, URLBlockList
from pipeline.errors import InputError
from pipeline.identity import fingerprint
from tests.data.prepare.filter_documents import (
    BLOCKED,
    FILTERS,
    OURS,
    TEXTS,
    URLS,
    answer_of,
    ours_of,
    theirs,
)

pytestmark = pytest.mark.slow  # spaCy takes seconds to import

NAMED = [
    cls
    for cls in vars(named).values()
    if isinstance(cls, type) and issubclass(cls, Filter) and cls is not Filter
]


@pytest.mark.parametrize("made", FILTERS, ids=str)
def test_decisions_are_datatroves(made):
    oracle = theirs(made)
    expected = {name: answer_of(oracle, text) or made.reason for name, text in TEXTS.items()}
    assert {name: ours_of(made, text=text) for name, text in TEXTS.items()} == expected
    reasons = {answer for answer in expected.values() if isinstance(answer, str)}
    assert FILTERS[made] <= reasons


def test_every_reason_of_the_sources_is_hit():
    """The reasons in datatrove's source code are those that the made documents are dropped for."""
    import ast

    hit = set().union(*FILTERS.values())
    for cls in {made.source[1] for made in FILTERS}:
        code = ast.parse(inspect.cleandoc("\n" + inspect.getsource(getattr(datatrove, cls))))
        for node in ast.walk(code):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                reason = node.value.elts[1]
                assert not isinstance(reason, ast.Constant) or reason.value in hit, cls


@pytest.mark.parametrize("made", OURS, ids=str)
def test_reasons_of_our_own(made):
    texts = [*TEXTS.values(), "word " * 101, "x" * 2001, "one two", "ab", LONG_WORDS]
    answers = [made({"text": text}) for text in texts]
    assert {answer for answer in answers if isinstance(answer, str)} == OURS[made]
    assert True in answers


LONG_WORDS = f"{'y' * 300} " * 20


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_terminal_punctuation_is_the_first_rule_of_fineweb(text):
    found = named.FineWebQuality()({"text": text})
    expected = found if found in ("empty", "line_punct_ratio") else True
    assert TerminalPunctuation()({"text": text}) == expected


@pytest.mark.parametrize(
    ("bounds", "text", "answer"),
    [
        ({"min_words": 2}, "one", "too few words"),
        ({"min_words": 2}, "one two", True),
        ({"max_words": 2}, "one\ttwo\nthree", "too many words"),
        ({"max_characters": 3}, "äöü", True),
        ({"max_characters": 3}, "äöüß", "too many characters"),
        ({"min_characters": 1}, "", "too few characters"),
        ({}, "", True),
    ],
)
def test_length(bounds, text, answer):
    assert Length(**bounds)({"text": text}) == answer


PIECES = ["the", "engine", "of", "- ", "• ", "...", "…", ".", "#", "\n", "\n\n", " ", "Word", "42"]
PIECES += [
    "{",
    "lorem ipsum",
    "javascript",
    "[1]",
    "use cookies",
    "don't",
    "e.g.",
    "文。",
    "\u200b",
]
CHECKED = [
    named.GopherQuality(min_doc_words=5),
    named.GopherRepetition(),
    named.C4Quality(min_num_sentences=1),
    named.FineWebQuality(),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=80), st.booleans())
def test_decisions_on_random_texts(pieces, spaced):
    text = (" " if spaced else "").join(pieces)
    for made in CHECKED:
        assert ours_of(made, text=text) == answer_of(_oracle(made), text)


def test_a_decision_does_not_depend_on_the_documents_before():
    """Of a word that spaCy takes for a name of its own."""
    made, text = (
        named.C4Quality(split_paragraph=False, min_num_sentences=-1),
        "A B IS_ALPHA c d. " * 9,
    )
    answers = [made({"text": text})]
    for n in range(3):
        made({"text": f"other words {n} are here."})
        answers.append(made({"text": text}))
    assert answers == [answers[0]] * 4


def _oracle(made, known={}):  # noqa: B006 - one object of datatrove's for all examples
    if made not in known:
        known[made] = theirs(made)
    return known[made]


@pytest.mark.parametrize("cls", [cls for cls in NAMED if hasattr(cls, "source")])
def test_parameters_and_defaults_are_datatroves(cls):
    signature = inspect.signature(getattr(datatrove, cls.source[1])).parameters
    expected = {n: p.default for n, p in signature.items() if n != "exclusion_writer"}
    ours = {
        f.name: inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default
        for f in dataclasses.fields(cls)
        if f.init and f.name not in (*cls.files, "column")
    }
    if cls is TerminalPunctuation:
        expected = {name: expected[name] for name in ours}
    assert ours == expected


@pytest.mark.parametrize("url", URLS)
def test_url_lists(url):
    found = answer_of(_oracle(BLOCKED), "", url=url)
    assert BLOCKED({"text": "", "url": url}) == URLS[url] == found


def test_url_lists_of_files(tmp_path):
    domains, urls = tmp_path / "domains", tmp_path / "urls"
    domains.write_text("# ours\nbad.com\n\nblog.host.co.uk\n")
    urls.write_text("http://other.org/one\n")
    made = URLBlockList(str(domains), str(urls), use_integrated_lists=False)
    answers = {url: made({"text": "", "url": url}) for url in URLS}
    listed = ("domain", "subdomain", "url")
    assert answers == {url: a if a in listed else True for url, a in URLS.items()}
    with pytest.raises(InputError, match="column 'url', found the columns text"):
        made({"text": ""})
    for url in (None, ""):  # of one document, which `skip_failed` leaves out
        with pytest.raises(ValueError, match=f"column 'url', found {url!r}"):
            made({"text": "", "url": url})
    other = dataclasses.replace(made, column="link")
    assert other({"text": "", "link": "http://bad.com"}) == "domain"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Path of a small fastText model of two languages."""
    fasttext = pytest.importorskip("fasttext")
    folder = tmp_path_factory.mktemp("model")
    lines = [f"__label__en the ship {i} is old and grey" for i in range(200)]
    lines += [f"__label__de das Schiff {i} ist alt und grau" for i in range(200)]
    (folder / "train.txt").write_text("\n".join(lines))
    trained = fasttext.train_supervised(
        str(folder / "train.txt"), dim=8, minn=2, maxn=3, bucket=1000, thread=1, verbose=0
    )
    trained.save_model(str(folder / "model.bin"))
    return folder / "model.bin"


def test_language(model):
    texts = ["the ship is\nold", "das Schiff ist alt", "the ship das Schiff", "xyz", ""]
    answers = set()
    for languages in (None, ("en",), ("de", "fr"), ("fr",)):
        for threshold in (0.3, 0.65, 0.99):
            made = Language(str(model), languages, threshold)
            # It is made without a look for the distribution of fastText that datatrove names.
            oracle = object.__new__(datatrove.LanguageFilter)
            oracle.__init__(list(languages) if languages else None, threshold)
            oracle.model._model = load(str(model))
            for text in texts:
                kept = bool(oracle.filter(Document(text=text, id="")))
                answers.add(made({"text": text}))
                assert made({"text": text}) == (kept or "language")
    assert answers == {True, "language"}


def load(path):
    from fasttext.FastText import _FastText

    return _FastText(path)


def test_the_content_of_a_file_is_in_the_key_and_its_path_is_not(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("bad.com\n")
    second.write_text("bad.com\n")
    made = URLBlockList(str(first), use_integrated_lists=False)
    same = URLBlockList(str(second), use_integrated_lists=False)
    assert fingerprint.canonical(made) == fingerprint.canonical(same)
    second.write_text("other.com\n")
    other = URLBlockList(str(second), use_integrated_lists=False)
    swapped = URLBlockList(None, str(first), use_integrated_lists=False)
    forms = {repr(fingerprint.canonical(each)) for each in (made, other, swapped)}
    assert len(forms) == 3
    with pytest.raises(InputError, match="found another content"):
        same({"text": "", "url": "http://bad.com"})


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"no\.bin: expected a file .*found No such file"):
        Language("no.bin")
    with pytest.raises(InputError, match="expected tuples, found a list"):
        named.GopherQuality(stop_words=["the"])
    (tmp_path / "x.bin").write_text("no model")
    with pytest.raises(InputError, match="expected a fastText model"):
        Language(str(tmp_path / "x.bin"))({"text": ""})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="GopherQuality needs datatrove; install it with"):
        named.GopherQuality()
    assert Length(min_words=1)({"text": ""}) == "too few words"


def test_filters_travel_to_workers():
    for made in (*FILTERS, *OURS, BLOCKED):
        assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 - of our own
    assert len({repr(fingerprint.canonical(made)) for made in FILTERS}) == len(FILTERS)
    assert fingerprint.canonical(named.GopherQuality())["fields"] == {}
