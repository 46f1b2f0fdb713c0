"""Let a trained model write: completions of fixed prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.sampling_config import Sampling
from pipeline import InputError, Result, StepContext, step
from steps.artifacts import Checkpoint, Completions, Tokenizer
from steps.checkpoints.find import open_model
from steps.coordinator import FLAGS
from training.checks import at_least


def _check(arguments: Mapping[str, Any]) -> None:
    if not arguments["prompts"]:
        raise InputError('generate: expected at least one prompt, found none; "" begins a document')
    at_least("generate", new_tokens=(arguments["new_tokens"], 1))
    Sampling(**{name: arguments[name] for name in ("temperature", "top_k", "top_p", "seed")})


@step(output=Completions, version=2, check=_check, environment=FLAGS)
def generate(
    run: StepContext,
    model: Checkpoint,
    tokenizer: Tokenizer,
    *,
    prompts: tuple[str, ...],
    new_tokens: int = 80,
    temperature: float = 0.8,
    top_k: int | None = 40,
    top_p: float | None = None,
    seed: int = 0,
) -> Result:
    """A completion of each prompt by the final checkpoint, sampled with a fixed seed.

    All prompts are continued at once; see `models.sampling.Sampling` for how. A completion ends
    before the end token, if that comes, else after `new_tokens`.
    """
    from data.text_stream import prompt_ids
    from models.generate import check, stream

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    text_tokenizer = tokenizer.load()
    config = model.model
    encoded = [prompt_ids(text_tokenizer, prompt) for prompt in prompts]
    check(config, encoded, new_tokens)
    trained = model.train
    longest = max(map(len, encoded)) + new_tokens
    if longest > trained.sequence_length:
        run.warn(
            f"up to {longest:,} tokens are more than the {trained.sequence_length:,} the model "
            "was trained on; what comes after those may make no sense"
        )
    transformer = open_model(model.final, config, trained.compute_dtype)
    eos = text_tokenizer.eos_id
    written: list[list[int]] = [[] for _ in prompts]
    for parts in stream(transformer, encoded, new_tokens=new_tokens, sampling=sampling, eos_id=eos):
        for row, part in zip(written, parts, strict=True):
            row += part
        run.progress(max(map(len, written)), new_tokens, "tokens")
    completions = [
        {"prompt": prompt, "completion": text_tokenizer.decode([i for i in ids if i != eos])}
        for prompt, ids in zip(prompts, written, strict=True)
    ]
    first = completions[0]
    return {
        "completions": completions,
        "headline": [f"sample: {' '.join((first['prompt'] + first['completion']).split())}"],
    }
