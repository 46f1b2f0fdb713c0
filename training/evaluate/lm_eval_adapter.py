"""Adapts a trained model to EleutherAI's lm-evaluation-harness (`lm_eval.api.model.TemplateLM`).

The harness is an optional extra (`pip install ponente[lm-eval]`), imported on use. Written for its
release 0.4.13. It runs in one process, on all of its devices. Every document begins with the EOS
id, as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data.tokenizer.text_tokenizer import TextTokenizer
from models.generate.generate import generate
from models.transformer import Transformer
from pipeline.errors import InputError
from training.evaluate.loglikelihood import Continuation, Likelihood

_NEW_TOKENS = 64  # default where a task sets no max_gen_toks


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

    Args:
        model: parameters on the devices of `likelihood`; on one device, for tasks that generate.
        likelihood: scores rows of at most `longest` tokens.
        tokenizer: tokenizer of the model.
        longest: tokens of the longest row, including the one before the first prediction.
    """
    harness()
    from lm_eval import utils  # pyrefly: ignore[missing-import]
    from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]

    def scores(pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        # An empty continuation has log-likelihood 0, and `Likelihood` does not accept it.
        requests = [Continuation((*c, *k), len(c)) for c, k in pairs if k]
        found = iter(likelihood(model, requests))
        answers = [next(found) if k else None for _, k in pairs]
        return [(a.nats, a.greedy) if a is not None else (0.0, True) for a in answers]

    class PonenteLM(TemplateLM):
        """See `adapter`."""

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_id

        @property
        def max_length(self) -> int:
            return longest - 1

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            ids = tokenizer.encode_batch([string])[0].tolist()
            return ids if add_special_tokens is False else [tokenizer.eos_id, *ids]

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
            return [self._generate(*request.args) for request in requests]

        def _generate(self, context: str, settings: dict[str, Any]) -> str:
            if settings.get("do_sample") or settings.get("temperature"):
                raise InputError("generate_until: expected greedy decoding, got sampling settings")
            most = min(int(settings.get("max_gen_toks", _NEW_TOKENS)), longest // 2)
            prompt = self.tok_encode(context)[-(longest - most) :]
            eos = tokenizer.eos_id
            (ids,) = generate(model, [prompt], new_tokens=most, eos_id=eos)
            text = tokenizer.decode([token for token in ids if token != eos], prompt)
            until = settings.get("until") or ()
            ends = [text.find(end) for end in ([until] if isinstance(until, str) else until) if end]
            return text[: min([end for end in ends if end >= 0], default=len(text))]

    return PonenteLM()


def run_tasks(lm: Any, tasks: Sequence[Any], **settings: Any) -> dict[str, dict[str, Any]]:
    """Results by task, then by metric, such as {"hellaswag": {"acc": 0.26, "acc_stderr": ...}}.

    Args:
        lm: see `adapter`.
        tasks: names of tasks, or their configurations as mappings.
        settings: arguments of `lm_eval.simple_evaluate`, such as num_fewshot and limit.

    Raises:
        InputError: the harness is not installed, or has no such task.
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
