"""Odd special ids are written to GGUF as llama.cpp's converter writes them, or refused by name."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

from gguf import SpecialVocab

from tests.faults.registry import Fault, trials
from tests.random.folders import gguf, refusal
from tests.steps.exchange.hf_folders import write_small

_IDS = (0, 1, 7, 999, 1000, 99_999, 2**31, 2**32, 2**70, -1, -2, "0", "a", True, False, 1.0, 1.5)
_TOKENS = ("<|endoftext|>", "a", "the", "<none>", "", 7, True, [], ["a"], {}, {"content": "a"})
_PLACES = ("bos", "eos", "pad")


def random_ids(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Special ids at random: those that llama.cpp's converter writes, or refused by name."""

    logging.getLogger("gguf").setLevel(logging.CRITICAL)
    figures = dict.fromkeys(("written", "refused"), 0)
    sound_folder = workspace / "sound"
    sound_folder.mkdir()
    write_small(sound_folder)
    config = json.loads((sound_folder / "config.json").read_text())
    named = json.loads((sound_folder / "tokenizer_config.json").read_text())
    rows = config["vocab_size"]

    def trial(number: int) -> None:
        draw = random.Random(number)
        folder = shutil.copytree(sound_folder, workspace / "model")
        ids = {f"{place}_token_id": _id(draw) for place in _PLACES if draw.random() < 0.7}
        tokens = {
            f"{place}_token": draw.choice((draw.choice(_TOKENS), "<|endoftext|>", "a", None))
            for place in _PLACES
            if draw.random() < 0.4
        }
        given = {k: v for k, v in named.items() if k not in ("bos_token", "eos_token")}
        (folder / "config.json").write_text(json.dumps({**config, **ids}))
        (folder / "tokenizer_config.json").write_text(json.dumps({**given, **tokens}))
        try:
            written, line = refusal(lambda: gguf(folder, workspace, "f16"))
            what = f"{ids} {tokens}"
            if line is not None:
                figures["refused"] += 1
                assert any(f"{place}_token" in line for place in _PLACES), f"{what}: {line}"
                return
            figures["written"] += 1
            found = {n: f.contents() for n, f in written.fields.items()}
            for place in _PLACES:
                key = {"pad": "padding"}.get(place, place)
                got = found.get(f"tokenizer.ggml.{key}_token_id")
                assert got is None or 0 <= got < rows, f"{what}: {place} is {got}"
            try:
                wanted = SpecialVocab(folder, n_vocab=rows).special_token_ids
            except ValueError:  # of an id below 0
                return
            for place, index in wanted.items():
                # It looks up the names of added tokens only.
                if tokens.get(f"{place}_token") in ("a", "the", {"content": "a"}):
                    continue
                key = {"pad": "padding"}.get(place, place)
                got = found.get(f"tokenizer.ggml.{key}_token_id")
                assert got == index, f"{what}: {place} is {got}, not {index}"
        finally:
            shutil.rmtree(folder)

    return {"trials": trials(seed, count, trial), **figures}


def _id(draw: random.Random) -> Any:
    if draw.random() < 0.15:
        return [draw.choice(_IDS) for _ in range(draw.randrange(3))]
    return draw.choice((draw.choice(_IDS), 0, 5, None))


SUITES = (Fault("special ids, against llama.cpp's converter", 30, 2000, random_ids),)
