"""datatrove's own filter objects, and their decisions as the named filters say them."""

import dataclasses

from datatrove.data import Document
from datatrove.pipeline import filters as datatrove


def theirs(made):
    """datatrove's own filter with the parameters of ours."""
    cls = getattr(datatrove, made.source[1])
    own = (f.name for f in dataclasses.fields(made) if f.init)
    built = cls(**{n: getattr(made, n) for n in own if n not in (*made.files, "column")})
    if hasattr(built, "tldextractor"):
        built.tldextractor = made.build().tldextractor  # its own asks the network first
    return built


def answer_of(oracle, text, **metadata):
    """What datatrove decides, as ours says it; the error that it raises."""
    document = Document(text=text, id="0", metadata=metadata)
    try:
        answer = oracle.filter(document)
    except Exception as error:  # noqa: BLE001 - the same error is expected of ours
        return type(error)
    kept, reason = answer if isinstance(answer, tuple) else (answer, None)
    return reason if not kept else True if document.text == text else {"text": document.text}


def ours_of(made, **document):
    """What ours decides; the error that it raises."""
    try:
        return made(document)
    except Exception as error:  # noqa: BLE001
        return type(error)
