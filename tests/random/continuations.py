"""Random tokenizers and texts: text after any ids is the rest of all, and folders keep ids."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from data.tokenizer.text_tokenizer import TextStream, TextTokenizer
from data.tokenizer.tokenizer_file import with_fields
from steps.exchange.hf.tokenizer_files import read_tokenizer_files, write_tokenizer_files
from tests.data.tokenizer.published_shapes import special
from tests.faults.registry import Fault, trials

_SPACE = "\u2581"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SCRIPTS = (
    "the quick brown fox; jumps 12 345.6 \n\t",
    "ཨོཾ་མ་ཎི་པདྨེ་ཧཱུྃ",
    "東京タワー、日本語のテキスト。",
    "👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈👍🏽🎈🦙",
    "Привет, Καλημέρα ŁÓDŹ e\u0301 \u212b",
    "   \u00a0\u3000\u2028\u180e",
)
_SPLITS = (
    r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+|[^\s\p{L}\p{N}]+|\s+",
)
_ENDS = ("</s>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[stop]")
_BEGINS = ("<s>", "<|begin_of_text|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "[start]")


def _text(draw: random.Random, most: int) -> str:
    parts = [draw.choice(_SCRIPTS) for _ in range(draw.randint(1, 4))]
    return "".join(draw.choice(draw.choice(parts)) for _ in range(draw.randint(0, most)))


def _byte_level(draw: random.Random, texts: list[str], specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = draw.choice((None, *_SPLITS))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = plain
    if split is not None:
        first = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, plain])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=draw.randint(280, 700),
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_fallback(draw: random.Random, texts: list[str], specials: list[str]) -> Tokenizer:
    """In the shape of Llama 2's (a space before a document) or Gemma's (none)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    known = ["<unk>", *specials, *_BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=draw.randint(300, 700), special_tokens=known, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    spaces = normalizers.Replace(" ", _SPACE)
    decoded = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.pre_tokenizer, tokenizer.normalizer = None, spaces
    if draw.random() < 0.6:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoded.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoded)
    return _with(tokenizer, specials, byte_fallback=True, fuse_unk=True, unk_token="<unk>")


def _unigram(draw: random.Random, texts: list[str], specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    scheme = draw.choice(("always", "never"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=draw.randint(150, 400),
        special_tokens=["<unk>", *specials],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    description = json.loads(tokenizer.to_str())
    description["model"]["vocab"] += [[piece, -20.0] for piece in _BYTES]
    description["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(description))


def _with(tokenizer: Tokenizer, specials: list[str], **model: Any) -> Tokenizer:
    description = json.loads(tokenizer.to_str())
    description["model"].update(model)
    names = ["<unk>", *specials]
    description["added_tokens"] = [special(name, index) for index, name in enumerate(names)]
    return Tokenizer.from_str(json.dumps(description))


def _complete(library: Tokenizer, ids: list[int], whole: str) -> str:
    """The complete characters of the first ids of a text whose text is `whole`."""
    texts = (library.decode(ids[:n], skip_special_tokens=False) for n in range(len(ids) + 1))
    begun = (text.rstrip("\ufffd") for text in texts)
    return max((text for text in begun if whole.startswith(text)), key=len)


def continuations(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Text after ids, at once and as a stream, against the library's text of all ids."""
    figures = dict.fromkeys(("texts", "cuts", "inserted"), 0)

    def trial(number: int) -> None:
        draw = random.Random(number)
        bos, eos = draw.choice((None, *_BEGINS)), draw.choice(_ENDS)
        specials = [name for name in (bos, eos) if name is not None]
        draw.shuffle(specials)
        # A Unigram model without a letter of a special token's name would take the token for it.
        letters = " ".join(sorted({*"".join((*_ENDS, *_BEGINS))} - {_SPACE}))
        corpus = [_text(draw, 60) + " the of and" for _ in range(80)] + [letters] * 40
        kind = draw.choice((_byte_level, _byte_fallback, _unigram))
        library = kind(draw, corpus, specials)
        inserts = bos is not None and draw.random() < 0.5
        if inserts:
            known = {"id": bos, "ids": [library.token_to_id(bos)], "tokens": [bos]}
            description = json.loads(library.to_str())
            description["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": bos, "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"],
                "special_tokens": {bos: known},
            }
            library = Tokenizer.from_str(json.dumps(description))
        figures["inserted"] += inserts
        named = bos if not inserts else None
        made = TextTokenizer(with_fields(library.to_str().encode(), eos_token=eos, bos_token=named))
        folder = workspace / str(number)
        folder.mkdir()
        write_tokenizer_files(made, str(folder), made.vocab_size, 64)
        again = TextTokenizer(read_tokenizer_files(str(folder)))
        assert again.gives_ids_of(made), "other ids after export and import"
        assert (again.bos_id, again.eos_id) == (made.bos_id, made.eos_id)
        exported = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for _ in range(20):
            text = _text(draw, 30).replace(_SPACE, "")
            plain = library.encode(text, add_special_tokens=False).ids
            assert made.prompt_ids(text) == again.prompt_ids(text) == [made.bos_id, *plain]
            assert exported.encode(text).ids == library.encode(text).ids, f"{text!r}: exported"
            whole = library.decode(plain, skip_special_tokens=False)
            figures["texts"] += 1
            for cut in {0, len(plain), *(draw.randint(0, len(plain)) for _ in range(4))}:
                figures["cuts"] += 1
                _check(draw, made, library, plain, cut, whole)

    return {"trials": trials(seed, count, trial), **figures}


def _check(
    draw: random.Random,
    made: TextTokenizer,
    library: Tokenizer,
    plain: list[int],
    cut: int,
    whole: str,
) -> None:
    before, rest = [made.bos_id, *plain[:cut]], plain[cut:]
    wanted = whole[len(_complete(library, plain[:cut], whole)) :]
    found = made.decode(rest, before)
    assert found == wanted, f"{whole!r} after {cut} of {len(plain)} ids: {found!r}"
    assert made.continuation([*rest, made.eos_id], before) == wanted
    stream, pieces = TextStream(made, before), []
    while rest:
        size = draw.randint(1, 5)
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    streamed = "".join([*pieces, stream.finish()])
    assert streamed == wanted, f"{whole!r} after {cut} ids, as a stream: {streamed!r}"


SUITES = (Fault("text after any ids, against the library's text of all", 6, 1000, continuations),)
