"""Generate completions of fixed prompts with a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from models.generate.sampling_config import Sampling
from models.shape.validation import at_least
from pipeline import GangProcess, Hardware, InputError, Result, Runtime, StepContext, local, step
from pipeline.events import Emit, Progress, Warned
from steps.artifacts import Checkpoint, Completions, Tokenizer
from steps.checkpoints.find import open_model, read_tokenizer, too_long
from steps.declared import vocabulary
from steps.gang import FLAGS, joined


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """The argument of every process of the gang: the completions to generate."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    prompts: tuple[str, ...]
    new_tokens: int
    sampling: Sampling


def _check(arguments: Mapping[str, Any]) -> None:
    if not arguments["prompts"]:
        raise InputError('generate: expected at least one prompt, found none; "" begins a document')
    at_least("generate", new_tokens=(arguments["new_tokens"], 1))
    Sampling(**{name: arguments[name] for name in ("temperature", "top_k", "top_p", "seed")})
    if (tokenizer := arguments["tokenizer"]) is not None:
        own = vocabulary(arguments["checkpoint"])
        other = tokenizer.config.get("vocab_size")
        if None not in (own, other) and own != other:
            raise InputError(
                f"generate: the model's tokenizer has {own} ids, the one given {other}; leave it "
                "out for the model's own"
            )


@step(output=Completions, version=4, cpus=0, check=_check, environment=FLAGS)
def generate(
    run: StepContext,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None = None,
    *,
    prompts: tuple[str, ...],
    new_tokens: int = 80,
    temperature: float = 0.8,
    top_k: int | None = 40,
    top_p: float | None = None,
    seed: int = 0,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """A completion of each prompt by the final checkpoint, sampled with a fixed seed.

    All prompts are continued as one batch. A completion ends before the first EOS, or after
    `new_tokens`.

    Args:
        checkpoint: a trained model.
        tokenizer: by default the tokenizer of the model's training.
        prompts: texts to continue.
        new_tokens: most tokens of a completion.
        temperature: see `models.generate.sampling_config.Sampling` for this and the next three.
        top_k: sample among the k likeliest ids only.
        top_p: sample among the likeliest ids that have this share of the probability.
        seed: seed of the random numbers.
        hardware: the hardware to run on; one device of each process generates.
    """
    request = GenerationJob(
        checkpoint=checkpoint,
        tokenizer=tokenizer or checkpoint.tokenizer(),
        prompts=prompts,
        new_tokens=new_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
    )
    written = run.gang(hardware, write_process, request)
    pairs = zip(prompts, written, strict=True)
    completions = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
    first = " ".join((prompts[0] + written[0]).split())
    return {"completions": completions, "headline": [f"sample: {first}"]}


def write_process(request: GenerationJob, *, process: GangProcess, emit: Emit) -> list[str]:
    """One process of the gang; returns the completions, the same in each, on one device of it.

    All processes must start JAX, because the chips of a slice open together, and a process that
    only waited for process 0 would run into the timeout of the group.
    """
    from models.generate.generate import check, stream

    emit = emit if process.index == 0 else lambda _: None
    trained, new = request.checkpoint, request.new_tokens
    with joined(process):
        tokenizer = read_tokenizer(request.tokenizer.file, trained.model)
        encoded = [tokenizer.prompt_ids(prompt) for prompt in request.prompts]
        check(trained.model, encoded, new)
        if warning := too_long(max(map(len, encoded)) + new, trained.train.sequence_length):
            emit(Warned(warning))
        model = open_model(trained.final, trained.model, trained.train.compute_dtype)
        generated: list[list[int]] = [[] for _ in request.prompts]
        sampling, eos = request.sampling, tokenizer.eos_id
        for parts in stream(model, encoded, new_tokens=new, sampling=sampling, eos_id=eos):
            for row, part in zip(generated, parts, strict=True):
                row += part
            emit(Progress(max(map(len, generated)), new, "tokens"))
    return [tokenizer.continuation(*each) for each in zip(generated, encoded, strict=True)]
