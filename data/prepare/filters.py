"""The field's filters by name, with the parameters, defaults and decisions of datatrove.

    keep = (GopherRepetition(), GopherQuality(min_doc_words=20), FineWebQuality())

They need the extra `prepare`. Called with a document, a mapping of its columns, a filter returns
True to keep it, a reason to drop it, or the columns to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from data.prepare.datatrove_filter import Answer, DatatroveFilter
from pipeline.errors import InputError
from pipeline.identity.fingerprint import Runtime


@dataclass(frozen=True)
class Filter(DatatroveFilter):
    """A filter that can be called, as a function of `filter_documents(keep=)`."""

    def __call__(self, document: Mapping[str, Any]) -> Answer:
        # In this file, which a step then counts as its code.
        return self.decide(document)


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
        if not (url := document.get(self.column)):
            raise InputError(
                f"URLBlockList: expected a URL in the column {self.column!r}, found {url!r}; name "
                "the column with column=, and keep it with Fields(columns=...) of a source"
            )
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

    def decide(self, document: Mapping[str, Any]) -> Answer:
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
