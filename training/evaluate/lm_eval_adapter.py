"""Adapts a trained model to EleutherAI's lm-evaluation-harness (`lm_eval.api.model.TemplateLM`).

The harness 0.4.13 is an optional extra, imported on use. It runs in one process, on all of its
devices. Every document begins with BOS.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from data.tokenizer.text_tokenizer import TextTokenizer
from models.generate.generate import generate
from models.transformer import Transformer
from pipeline.errors import InputError
from training.evaluate.loglikelihood import Continuation, Likelihood

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of an answer's length; the first that a task sets counts, as in the harness."""
_NEW_TOKENS = 256  # the harness's own, where a task sets none
_ROWS = 16  # prompts that are answered together


def harness() -> Any:
    """The package `lm_eval`. Raises `InputError` when it is not installed."""
    try:
        import lm_eval  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise InputError(
            "tasks of lm-evaluation-harness need the package lm_eval: install ponente[lm-eval]"
        ) from error
    return lm_eval


def adapter(
    model: Transformer, likelihood: Likelihood, tokenizer: TextTokenizer, longest: int
) -> Any:
    """An `LM` that implements loglikelihood, loglikelihood_rolling and generate_until.

    The model is on the devices of `likelihood`; on one device, for tasks that generate. Rows have
    at most `longest` tokens, including the one before the first prediction.
    """
    harness()
    from lm_eval import utils  # pyrefly: ignore[missing-import]
    from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]

    def scores(pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        # An empty continuation has log-likelihood 0, and `Likelihood` does not accept it.
        found = iter(likelihood(model, [Continuation((*c, *k), len(c)) for c, k in pairs if k]))
        return [next(found) if k else (0.0, True) for _, k in pairs]

    class PonenteLM(TemplateLM):
        """See `adapter`."""

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.bos_id

        @property
        def max_length(self) -> int:
            return longest - 1

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            ids = tokenizer.prompt_ids(string)
            return ids[1:] if add_special_tokens is False else ids

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            return scores([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            found = []
            for request in requests:
                ids = tokenizer.encode_batch([request.args[0]])[0].tolist()
                windows = utils.get_rolling_token_windows(
                    ids, self.prefix_token_id, self.max_length, context_len=1
                )
                pairs = [utils.make_disjoint_window(window) for window in windows]
                found.append(sum(nats for nats, _ in scores(pairs)))
            return found

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts = [""] * len(requests)
            lengths = [_answer_length(request.args[1], longest) for request in requests]
            prompts = [
                self.tok_encode(request.args[0])[-(longest - most) :]
                for request, most in zip(requests, lengths, strict=True)
            ]
            for most, group in _groups(lengths, prompts):
                asked = [prompts[i] for i in group]
                written = generate(model, asked, new_tokens=most, eos_id=tokenizer.eos_id)
                for i, ids in zip(group, written, strict=True):
                    text = tokenizer.continuation(ids, prompts[i])
                    texts[i] = _until(text, requests[i].args[1].get("until"))
            return texts

    return PonenteLM()


def _answer_length(settings: dict[str, Any], longest: int) -> int:
    """Most tokens of an answer; refused if the task samples, or leaves no place for a prompt."""
    sampled = settings.get("do_sample")
    if sampled or (sampled is None and float(settings.get("temperature") or 0) > 0):
        raise InputError(
            "generate_until: expected greedy decoding, found sampling settings "
            f"{settings}; set do_sample: false in the task's generation_kwargs"
        )
    given = (settings[name] for name in _LENGTHS if settings.get(name) is not None)
    most = int(next(given, _NEW_TOKENS))
    if not 1 <= most < longest:
        raise InputError(
            f"generate_until: expected answers of 1 to {longest - 1} tokens, since the model was "
            f"trained on {longest}, found {most}; set max_gen_toks in the task's generation_kwargs "
            f"(without it the harness asks for {_NEW_TOKENS})"
        )
    return most


def _groups(
    lengths: Sequence[int], prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, list[int]]]:
    """(length of the answers, indices of prompts that are answered together) of every batch.

    The prompts of a batch have about one length, since rows are padded.
    """
    order = sorted(range(len(prompts)), key=lambda i: (lengths[i], len(prompts[i])))
    for most, same in itertools.groupby(order, key=lengths.__getitem__):
        alike = list(same)
        for start in range(0, len(alike), _ROWS):
            yield most, alike[start : start + _ROWS]


def _until(text: str, ends: str | Sequence[str] | None) -> str:
    ends = [ends] if isinstance(ends, str) else ends or ()
    found = [text.find(end) for end in ends if end]
    return text[: min([at for at in found if at >= 0], default=len(text))]


def run_tasks(lm: Any, tasks: Sequence[Any], **settings: Any) -> dict[str, dict[str, Any]]:
    """Results by task, then by metric, such as {"hellaswag": {"acc": 0.26, "acc_stderr": ...}}.

    Tasks are names, or configurations; `settings` are arguments of `lm_eval.simple_evaluate`.
    """
    evaluate = harness().simple_evaluate
    try:
        found = evaluate(lm, tasks=list(tasks), log_samples=False, **settings)
    except KeyError as error:
        raise InputError(f"lm_eval has no task {error}; see `lm_eval --tasks list`") from error
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for task, metrics in found["results"].items()
    }
