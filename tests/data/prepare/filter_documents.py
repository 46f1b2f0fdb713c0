"""Made documents that hit every reason of every filter, with the filters that drop them; and
datatrove's own filter objects, with their decisions as the named filters say them."""

import dataclasses

from datatrove.data import Document
from datatrove.pipeline import filters as datatrove

from data.prepare.filters import (
    C4Paragraph,
    C4Quality,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
    Length,
    Regex,
    TerminalPunctuation,
    URLBlockList,
)

SENTENCE = "The old engine of the ship was repaired with {} tools that have to be clean."
LONG = " ".join(SENTENCE.format(f"number{i}") for i in range(8))
LINES = "\n".join(SENTENCE.format(f"word{i}") for i in range(8))
RARE = " ".join(f"engine{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(60))
PHRASE = "seven grey geese crossed this small river near our house today"
GRAMS = f"{PHRASE}\n\nand later\n\n{PHRASE} while {PHRASE}"

TEXTS = {
    "plain": LINES,
    "empty": "",
    "blank": " \n\t ",
    "few words": "Only a few words are here.",
    "short words": "a be of to it is at we go up " * 6,
    "long words": "the internationalisation and that characteristically with " * 12,
    "hashes": f"{LONG} " + "# " * 40,
    "ellipses": f"{LONG} " + "and … " * 40,
    "bullets": "\n".join(f"- {SENTENCE.format(i)}" for i in range(8)),
    "open ends": "\n".join(f"{SENTENCE.format(i)[:-1]}..." for i in range(8)),
    "numbers": f"{LONG} " + "17 4096 23 " * 20,
    "no stop words": RARE,
    "one paragraph again": "\n\n".join([LINES] * 3),
    "long paragraph again": "\n\n".join(["one", "two", LONG, LONG, "three", "four", "five"]),
    "one line again": "\n".join([SENTENCE.format("x")] * 5 + [SENTENCE.format("y")]),
    "long line again": "\n".join(["one", "two", LONG, LONG, "three", "four", "five"]),
    "phrases again": GRAMS,
    "lorem": f"{LINES}\nHere lorem ipsum stands for text.",
    "curly": f"{LINES}\nThis line has a {{ in it.",
    "lines to remove": f"{LINES}\nno end here\nToo few.\nPlease enable Javascript for this page.\n"
    f"See our privacy policy for all of this.\nA claim[12] with [citation needed] is here.\n"
    f"{'x' * 1200} is one long word.",
    "no ends": "\n".join(f"{SENTENCE.format(i)[:-1]}" for i in range(8)),
    "short lines": "\n".join(["Short one.", "Short two.", "Short three.", SENTENCE.format("x")]),
    "list": "\n".join(f"A line with words {i} and more of it." for i in range(3)) + "\n" * 20,
    "Japanese": "これは文です。" * 20,
    "odd characters": "\u200b\ufeff \x00 \u2028 na\u00efve \U0001f600. " * 20,
}

GRAM = dict.fromkeys(
    ("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac"), None
)
TOP = {n: GopherRepetition(**GRAM, top_n_grams=((n, 0.05),), dup_n_grams=()) for n in (2, 3, 4)}
DUP = {n: GopherRepetition(**GRAM, top_n_grams=(), dup_n_grams=((n, 0.1),)) for n in range(5, 11)}

FILTERS = {
    GopherQuality(): {
        "gopher_short_doc",
        "gopher_below_avg_threshold",
        "gopher_above_avg_threshold",
        "gopher_too_many_hashes",
        "gopher_too_many_ellipsis",
        "gopher_too_many_bullets",
        "gopher_too_many_end_ellipsis",
        "gopher_below_alpha_threshold",
        "gopher_enough_stop_words",
    },
    GopherQuality(max_doc_words=60, stop_words=("number",), min_stop_words=1): {"gopher_long_doc"},
    GopherRepetition(): {"empty", "dup_para_frac", "dup_line_frac"},
    GopherRepetition(dup_para_frac=None): {"dup_para_char_frac"},
    GopherRepetition(dup_para_frac=None, dup_line_frac=None, dup_para_char_frac=None): {
        "dup_line_char_frac"
    },
    **{made: {f"top_{n}_gram"} for n, made in TOP.items()},
    **{made: {f"duplicated_{n}_n_grams"} for n, made in DUP.items()},
    C4Quality(): {"lorem_ipsum", "curly_bracket", "too_few_sentences"},
    C4Quality(split_paragraph=False, min_num_sentences=-1, max_word_length=-1): {"lorem_ipsum"},
    C4Paragraph(): {"< 3 paragraphs"},
    FineWebQuality(): {"empty", "line_punct_ratio", "short_line_ratio", "char_dup_ratio"},
    FineWebQuality(line_punct_exclude_zero=True, stop_chars=(";",)): {"list_ratio"},
    FineWebQuality(language="deu"): {"char_dup_ratio"},
    Regex(r"geese\s+crossed"): {"regex"},
}
OURS = {
    TerminalPunctuation(): {"empty", "line_punct_ratio"},
    Length(min_words=10, max_words=100, min_characters=5, max_characters=2000): {
        "too few words",
        "too many words",
        "too few characters",
        "too many characters",
    },
}

URLS = {
    "https://good.example.org/page": True,
    "http://bad.com/page": "domain",
    "http://www.bad.com/page": "domain",
    "http://blog.host.co.uk/page": "subdomain",
    "http://host.co.uk/page": True,
    "http://other.org/one": "url",
    "http://other.org/casino-royale": "hard_blacklisted",
    "http://other.org/soft-words-adult-here": "soft_blacklisted",
    "http://other.org/soft-word": True,
    "http://other.org/xx-sub-word-xx": "blacklisted_subword",
}
BLOCKED = URLBlockList(
    extra_domains=("bad.com", "blog.host.co.uk"),
    extra_urls=("http://other.org/one",),
    banned_words=("casino",),
    banned_subwords=("subword",),
    soft_banned_words=("soft", "adult"),
    use_integrated_lists=False,
)


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
