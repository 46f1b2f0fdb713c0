"""Let a trained model write: completions of fixed prompts."""

from __future__ import annotations

from models.config import TransformerConfig
from pipeline import Result, StepRun, step
from steps.artifacts import Checkpoint, Completions, Tokenizer


@step(output=Completions, version=1)
def generate(
    run: StepRun,
    model: Checkpoint,
    tokenizer: Tokenizer,
    *,
    prompts: tuple[str, ...],
    new_tokens: int = 80,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Result:
    """A completion of each prompt by the final checkpoint, sampled with a fixed seed."""
    import jax

    from models.generate import generate as complete
    from training.load import load_model

    text_tokenizer = tokenizer.load()
    config = TransformerConfig.from_plain(model.result["model"])
    transformer = load_model(model.final, config)
    encoded = [text_tokenizer.encode_batch([prompt])[0].tolist() for prompt in prompts]
    # One window for all prompts: the program is compiled once.
    window = max(len(ids) for ids in encoded) + new_tokens
    completions = []
    for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        written = complete(
            transformer,
            ids,
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=min(top_k, config.vocab_size),
            key=jax.random.fold_in(jax.random.key(seed), index),
            eos_id=text_tokenizer.eos_id,
            window=window,
        )
        completions.append({"prompt": prompt, "completion": text_tokenizer.decode(written)})
        run.progress(index + 1, len(prompts), "prompts")
    first = completions[0]
    return {
        "completions": completions,
        "headline": [f"sample: {' '.join((first['prompt'] + first['completion']).split())}"],
    }
