"""The field's filters by name, with the parameters, defaults and decisions of datatrove.

    keep = (GopherRepetition(), GopherQuality(min_doc_words=20), FineWebQuality())

They need the extra `prepare`. Called with a document, a mapping of its columns, a filter returns
True to keep it, a reason to drop it, or the columns to change. It is a frozen dataclass whose
fields are in the key of a step; of a file that it reads, the content is in the key and the path is
not. datatrove's object is built once per process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from pipeline.errors import InputError
from pipeline.identity.fingerprint import Runtime

Answer = bool | str | dict[str, Any]

_BREAKS = "IS_ALPHA"
_INSTALL = "install it with: pip install -e '.[prepare]' in the checkout of ponente"


@dataclass(frozen=True)
class Filter:
    """A filter of datatrove, with its parameters as fields, as a function of
    `filter_documents(keep=)`.
    """

    source: ClassVar[tuple[str, str]]  # module and class in `datatrove.pipeline.filters`
    needs: ClassVar[tuple[str, ...]] = ("datatrove", "spacy")  # modules that must be installed
    files: ClassVar[tuple[str, ...]] = ()  # fields with the paths of files that the filter reads
    reason: ClassVar[str] = ""  # why a document is dropped where datatrove gives no reason
    content: str = field(default="", init=False, repr=False)  # digest of the files

    def __post_init__(self) -> None:
        if missing := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            raise InputError(f"{type(self).__name__} needs {missing[0]}; {_INSTALL}")
        for name in self.files:
            if path := getattr(self, name):
                object.__setattr__(self, name, os.path.abspath(os.path.expanduser(path)))
        object.__setattr__(self, "content", self.digest_files())
        try:
            hash(self)
        except TypeError:
            raise InputError(f"{self}: expected tuples, found a list; write (...,)") from None

    def digest_files(self) -> str:
        """SHA-256 over the names of the fields and the contents of their files."""
        found = {name: getattr(self, name) for name in self.files if getattr(self, name)}
        digests = {name: _sha256(type(self).__name__, path) for name, path in found.items()}
        return hashlib.sha256(repr(digests).encode()).hexdigest() if digests else ""

    def build(self) -> Any:
        """An object of datatrove that decides as its filter does: `filter(document)`."""
        module, name = self.source
        cls = getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), name)
        return cls(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """The arguments of datatrove's class."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        given = {name: value for name, value in own.items() if name not in self.files}
        if "language" in given:
            given["language"] = _splitter(given["language"])
        return given

    def metadata(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """What datatrove's filter reads of a document besides its text."""
        del document
        return {}

    def __call__(self, document: Mapping[str, Any]) -> Answer:
        """True to keep a document, a reason to drop it, or the columns that change."""
        from datatrove.data import Document

        asked = Document(text=document["text"], id="", metadata=self.metadata(document))
        answer = _built(self).filter(asked)
        kept, reason = answer if isinstance(answer, tuple) else (answer, self.reason)
        if not kept:
            return reason
        return True if asked.text == document["text"] else {"text": asked.text}


@functools.cache
def _built(filter: Filter) -> Any:
    if filter.digest_files() != filter.content:
        raise InputError(
            f"{filter}: expected the file that the run was planned with, found another content; "
            "run again, and do not change it meanwhile"
        )
    return filter.build()


def _sha256(who: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            f"{who}: {path}: expected a file that can be read here and on every worker, found "
            f"{error.strerror or error}"
        ) from None


@functools.cache
def _splitter(language: str) -> Any:
    """What splits texts into words and sentences for datatrove: its own splitter of the language.

    spaCy's also marks sentences whenever it is asked for words; ours does not, and the words are
    the same. One object for all filters, since datatrove keeps the words of the last texts by it.
    The word IS_ALPHA, a name of spaCy's own, is left out: what spaCy makes of a text with it
    depends on the texts before it.
    """
    from datatrove.utils.word_tokenizers import SpaCyTokenizer, load_word_tokenizer

    known = load_word_tokenizer(language)
    if type(known) is not SpaCyTokenizer or known.language == "ja":  # which cuts long texts
        return known

    class Words(SpaCyTokenizer):
        def _do_tokenize(self, text: str) -> Any:
            return super()._do_tokenize(text.replace(_BREAKS, ""))

        def word_tokenize(self, text: str) -> list[str]:
            try:
                with self.tokenizer.memory_zone():
                    tokens = self.tokenizer.tokenizer(text.replace(_BREAKS, ""))
                    return [word for token in tokens if (word := token.text.strip())]
            except Exception:  # noqa: BLE001 - datatrove tries again with another text
                return super().word_tokenize(text)

    return Words(str(known.language))


@dataclass(frozen=True)
class GopherQuality(Filter):
    """Rules on words, symbols, bullets and stop words (Rae et al. 2021, arXiv:2112.11446).

    A bound of None is not checked. English stop words unless `stop_words` names others.
    """

    source = ("gopher_quality_filter", "GopherQualityFilter")
    min_doc_words: int | None = 50
    max_doc_words: int | None = 100000
    min_avg_word_length: int | None = 3
    max_avg_word_length: int | None = 10
    max_symbol_word_ratio: float | None = 0.1
    max_bullet_lines_ratio: float | None = 0.9
    max_ellipsis_lines_ratio: float | None = 0.3
    max_non_alpha_words_ratio: float | None = 0.8
    min_stop_words: int | None = 2
    stop_words: tuple[str, ...] | None = None
    language: str = "eng"


@dataclass(frozen=True)
class GopherRepetition(Filter):
    """Shares of repeated lines, paragraphs and n-grams (arXiv:2112.11446, table A1).

    `top_n_grams` and `dup_n_grams` are pairs (n, largest share of the characters).
    """

    source = ("gopher_repetition_filter", "GopherRepetitionFilter")
    dup_line_frac: float | None = 0.3
    dup_para_frac: float | None = 0.3
    dup_line_char_frac: float | None = 0.2
    dup_para_char_frac: float | None = 0.2
    top_n_grams: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    dup_n_grams: tuple[tuple[int, float], ...] = (
        *((5, 0.15), (6, 0.14), (7, 0.13)),
        *((8, 0.12), (9, 0.11), (10, 0.10)),
    )
    language: str = "eng"


@dataclass(frozen=True)
class C4Quality(Filter):
    """Rules on lines and whole documents (Raffel et al. 2020, arXiv:1910.10683).

    It changes texts: lines without terminal punctuation, of few words, or about JavaScript, cookies
    or terms of use are removed, and citations. Of `min_num_sentences`, `min_words_per_line` and
    `max_word_length`, -1 is no bound.
    """

    source = ("c4_filters", "C4QualityFilter")
    split_paragraph: bool = True
    remove_citations: bool = True
    filter_no_terminal_punct: bool = True
    min_num_sentences: int = 5
    min_words_per_line: int = 3
    max_word_length: int = 1000
    filter_lorem_ipsum: bool = True
    filter_javascript: bool = True
    filter_curly_bracket: bool = True
    filter_policy: bool = True
    language: str = "eng"


@dataclass(frozen=True)
class C4Paragraph(Filter):
    """At least three lines of 200 characters, as in mC4 (Xue et al. 2021, arXiv:2010.11934)."""

    source = ("c4_filters", "C4ParagraphFilter")


@dataclass(frozen=True)
class FineWebQuality(Filter):
    """Rules on the ends, lengths and repetition of lines (Penedo et al. 2024, arXiv:2406.17557).

    `stop_chars` end a line with terminal punctuation; None takes those of all scripts.
    """

    source = ("fineweb_quality_filter", "FineWebQualityFilter")
    line_punct_thr: float = 0.12
    line_punct_exclude_zero: bool = False
    stop_chars: tuple[str, ...] | None = None
    short_line_thr: float = 0.67
    short_line_length: int = 30
    char_duplicates_ratio: float = 0.01
    new_line_ratio: float = 0.3
    language: str = "eng"


@dataclass(frozen=True)
class TerminalPunctuation(Filter):
    """The first rule of `FineWebQuality` alone: the share of lines with terminal punctuation."""

    source = FineWebQuality.source
    line_punct_thr: float = 0.12
    line_punct_exclude_zero: bool = False
    stop_chars: tuple[str, ...] | None = None

    def arguments(self) -> dict[str, Any]:
        off = ("short_line_thr", "char_duplicates_ratio", "new_line_ratio")
        return {**super().arguments(), **dict.fromkeys(off, float("inf"))}


@dataclass(frozen=True)
class Regex(Filter):
    """Drops documents in which the expression is found."""

    source = ("regex_filter", "RegexFilter")
    reason = "regex"
    regex_exp: str


@dataclass(frozen=True)
class URLBlockList(Filter):
    """Domains, URLs and words of URLs that are not wanted; needs a column with the URL.

    datatrove's own lists are inside its package. `domains_file` and `urls_file` have one entry a
    line, `#` for comments. Domains are divided by the public suffix list inside tldextract: no
    request is made.
    """

    source = ("url_filter", "URLFilter")
    needs = ("datatrove", "tldextract", "ahocorasick", "fasteners")
    files = ("domains_file", "urls_file")
    domains_file: Annotated[str | None, Runtime] = None
    urls_file: Annotated[str | None, Runtime] = None
    soft_word_threshold: int = 2
    extra_domains: tuple[str, ...] | None = None
    extra_urls: tuple[str, ...] | None = None
    banned_words: tuple[str, ...] | None = None
    banned_subwords: tuple[str, ...] | None = None
    soft_banned_words: tuple[str, ...] | None = None
    use_integrated_lists: bool = True
    column: str = "url"

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        del given["column"]
        given["extra_domains"] = [*(self.extra_domains or ()), *_lines(self.domains_file)]
        given["extra_urls"] = [*(self.extra_urls or ()), *_lines(self.urls_file)]
        return given

    def build(self) -> Any:
        from tldextract import TLDExtract

        built = super().build()
        built.tldextractor = TLDExtract(cache_dir=None, suffix_list_urls=())
        return built

    def metadata(self, document: Mapping[str, Any]) -> dict[str, Any]:
        if self.column not in document:
            raise InputError(
                f"URLBlockList: expected a URL in the column {self.column!r}, found the columns "
                f"{', '.join(document)}; name the column with column=, and keep it with "
                "Fields(columns=...) of a source"
            )
        if not (url := document[self.column]):  # a fault of this document, see `skip_failed`
            raise ValueError(f"expected a URL in the column {self.column!r}, found {url!r}")
        return {"url": url}


def _lines(path: str | None) -> list[str]:
    if path is None:
        return []
    with open(path, encoding="utf-8") as file:
        return [line for line in file if line.strip()]


@dataclass(frozen=True)
class Language(Filter):
    """Documents in some languages, by a fastText model of your own, such as lid.176.bin.

    Attributes:
        model: path of the model: labels are `__label__en` (lid.176) or `__label__eng_Latn`
            (GlotLID). Every worker must have it there.
        languages: those to keep, one of which must score above the threshold; None for any.
    """

    needs = ("datatrove", "fasttext")
    files = ("model",)
    reason = "language"
    model: Annotated[str, Runtime]
    languages: tuple[str, ...] | None = None
    language_threshold: float = 0.65

    def build(self) -> Any:
        return _Language(self)


class _Language:
    """`LanguageFilter` of datatrove for a model that is there; its own downloads one."""

    def __init__(self, given: Language) -> None:
        from datatrove.utils.lid import FastTextLID
        from fasttext.FastText import _FastText

        try:
            loaded = _FastText(given.model)
        except ValueError as error:
            raise InputError(f"Language: expected a fastText model: {error}") from None
        kind = type("Model", (FastTextLID,), {"model": loaded})
        self._model = kind(list(given.languages) if given.languages else None)
        self._threshold = given.language_threshold

    def filter(self, document: Any) -> bool:
        (_, best), scores = self._model.predict(document)
        asked = scores.values() if self._model.languages else (best,)
        return any(score > self._threshold for score in asked)


@dataclass(frozen=True)
class Length(Filter):
    """Bounds on the number of words, which white space divides, and of characters."""

    needs = ()
    min_words: int | None = None
    max_words: int | None = None
    min_characters: int | None = None
    max_characters: int | None = None

    def __call__(self, document: Mapping[str, Any]) -> Answer:
        text = document["text"]
        counts = {"characters": len(text)}
        if self.min_words is not None or self.max_words is not None:
            counts["words"] = len(text.split())
        for unit, count in counts.items():
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if least is not None and count < least:
                return f"too few {unit}"
            if most is not None and count > most:
                return f"too many {unit}"
        return True
