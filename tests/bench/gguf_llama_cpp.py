"""The half of `tests.bench.gguf_export` that llama.cpp runs: JSON on stdin, JSON on stdout."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Ids of texts; the last logits of prompts and the likeliest tokens that follow."""
    import llama_cpp  # pyrefly: ignore[missing-import]
    import numpy as np

    asked = json.load(sys.stdin)
    model = llama_cpp.Llama(asked["model"], n_ctx=128, n_threads=1, logits_all=True, verbose=False)
    ids = [
        model.tokenize(text.encode(), add_bos=True, special=False) if text else []
        for text in asked["texts"]
    ]
    logits, greedy = [], []
    for prompt in asked["prompts"]:
        model.reset()
        model.eval(prompt)
        logits.append(model.scores[len(prompt) - 1].tolist())
        written: list[int] = []
        for _ in range(asked["new"]):
            written.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(written[-1:])
        greedy.append(written)
    answer = {"ids": ids, "logits": logits, "greedy": greedy, "version": llama_cpp.__version__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
