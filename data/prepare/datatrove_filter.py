"""What the named filters share: a filter is a value of a configuration that datatrove decides for.

A filter is a frozen dataclass whose fields are in the key of a step. datatrove's object is built
once per process. Of a file that a filter reads, the content is in the key and the path is not.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from pipeline.errors import InputError

Answer = bool | str | dict[str, Any]

_BREAKS = "IS_ALPHA"
_INSTALL = "install it with: pip install -e '.[prepare]' in the checkout of ponente"


@dataclass(frozen=True)
class DatatroveFilter:
    """A filter of datatrove; subclasses have its parameters as fields.

    Attributes:
        source: module and class in `datatrove.pipeline.filters`.
        needs: modules that must be installed.
        files: names of the fields with the paths of files that the filter reads.
        reason: why a document is dropped where datatrove gives no reason.
        content: digest of these files.
    """

    source: ClassVar[tuple[str, str]]
    needs: ClassVar[tuple[str, ...]] = ("datatrove", "spacy")
    files: ClassVar[tuple[str, ...]] = ()
    reason: ClassVar[str] = ""
    content: str = field(default="", init=False, repr=False)

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
        """SHA-256 over the names of the fields and the contents of their files; "" for none."""
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

    def decide(self, document: Mapping[str, Any]) -> Answer:
        """True to keep a document, a reason to drop it, or the columns that change."""
        from datatrove.data import Document

        asked = Document(text=document["text"], id="", metadata=self.metadata(document))
        answer = _built(self).filter(asked)
        kept, reason = answer if isinstance(answer, tuple) else (answer, self.reason)
        if not kept:
            return reason
        return True if asked.text == document["text"] else {"text": asked.text}


@functools.cache
def _built(filter: DatatroveFilter) -> Any:
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
