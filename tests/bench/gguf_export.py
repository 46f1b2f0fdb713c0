"""What llama.cpp makes of an exported model: ids of texts, logits and greedy text.

    python -m tests.bench.gguf_export FOLDER ... --python PATH

One JSON object a line on stdout, for every Hugging Face folder and type of numbers. PATH is a
Python with `llama-cpp-python` (building it takes many minutes, so it is in no environment of ours);
the reference is `transformers` in float32 and our own tokenizer. Without a FOLDER: Llama, Qwen3 and
GPT-2 shapes with random weights.

`texts` are documents of the CPython corpus, `odd_texts` random characters of all planes; both say
how many have equal ids. `logits` is the largest difference of a logit after `--prompts` texts,
beside the `largest` logit. `greedy` counts prompts after which all `--new` tokens are equal; where
they part, `parting_margins` has how far apart the two likeliest tokens were in the reference: a
margin below the difference of logits is one of rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from data.read import python_docs
from data.tokenizer.text_tokenizer import TextTokenizer
from steps.exchange.gguf.file import write_gguf

CHILD = Path(__file__).with_name("gguf_llama_cpp.py")
NO_CHARACTERS = range(0xD800, 0xE000)


def real_texts(count: int) -> list[str]:
    """Documents, cut to 2,000 characters; parts of them when there are too few."""
    documents = python_docs.documents()["text"].to_pylist()
    pieces = [t[i : i + 2000] for t in documents for i in range(0, len(t), 2000)]
    return random.Random(0).sample(pieces, count)


def odd_texts(count: int) -> list[str]:
    """Random characters, half of them letters and spaces."""
    draw = random.Random(1)

    def character() -> str:
        if draw.random() < 0.5:
            return draw.choice("abc 019  \n\t'sSétR.,!")
        code = draw.choice((draw.randrange(0x300), draw.randrange(0x3000), draw.randrange(0x20000)))
        return " " if code in NO_CHARACTERS else chr(code)

    return ["".join(character() for _ in range(draw.randrange(1, 60))) for _ in range(count)]


class Reference:
    """The model in a folder as `transformers` computes it in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # its threads wait actively, which a busy machine punishes
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, ids: list[int]) -> np.ndarray:
        """[position, vocab]."""
        with self._torch.no_grad():
            return self._model(self._torch.tensor([ids])).logits[0].numpy()

    def greedy(self, ids: list[int], new: int) -> list[int]:
        """The tokens that follow, by the whole row each time."""
        row = list(ids)
        for _ in range(new):
            row.append(int(self.logits(row)[-1].argmax()))
        return row[len(ids) :]


def measure(folder: Path, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the output."""
    tokenizer = TextTokenizer((folder / "tokenizer.json").read_bytes())
    texts, odd = real_texts(options.texts), odd_texts(options.texts)
    prompts = [tokenizer.encode_batch([t])[0].tolist()[:24] for t in texts[: options.prompts]]
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/model.gguf"
        written = write_gguf(str(folder), path, dtype, folder.name)
        asked = {"model": path, "texts": texts + odd, "prompts": prompts, "new": options.new}
        done = subprocess.run(
            [options.python, str(CHILD)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{options.python} failed:\n{done.stderr[-2000:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = [tokenizer.encode_batch([t])[0].tolist() for t in texts + odd]
    equal = [a == b for a, b in zip(ours, theirs["ids"], strict=True)]
    reference = Reference(folder)
    logits = [reference.logits(prompt)[-1] for prompt in prompts]
    same, margins = 0, []
    for prompt, found in zip(prompts, theirs["greedy"], strict=True):
        wanted = reference.greedy(prompt, options.new)
        parts = next((i for i in range(options.new) if wanted[i] != found[i]), None)
        same += parts is None
        if parts is not None:
            best = np.sort(reference.logits(prompt + wanted[:parts])[-1])[-2:]
            margins.append(round(float(best[1] - best[0]), 4))
    apart = np.abs(np.array(theirs["logits"]) - np.array(logits))
    return {
        "folder": folder.name,
        "dtype": dtype,
        **{name: written[name] for name in ("architecture", "pre_tokenizer", "bytes")},
        "texts": f"{sum(equal[: len(texts)])} of {len(texts)}",
        "odd_texts": f"{sum(equal[len(texts) :])} of {len(odd)}",
        "logits": round(float(apart.max()), 4),
        "largest": round(float(np.abs(logits).max()), 2),
        "greedy": f"{same} of {len(prompts)}",
        "parting_margins": margins,
        "llama_cpp_python": theirs["version"],
    }


def main() -> None:
    """Print a row for each folder and type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--dtypes", nargs="+", default=["f16"])
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new", type=int, default=32)
    options = parser.parse_args()
    folders = options.folders
    if not folders:
        from tests.steps.exchange.hf_folders import MODELS, folder

        folders = [folder(name) for name in MODELS]
    for each in folders:
        for dtype in options.dtypes:
            print(json.dumps(measure(each, dtype, options)), flush=True)


if __name__ == "__main__":
    main()
