"""Fixed prompts, and the text that the model of the moment writes after them."""

from __future__ import annotations

from dataclasses import dataclass

from data.tokenizer.streaming_decode import prompt_ids
from data.tokenizer.text_tokenizer import TextTokenizer
from models.config import TransformerConfig
from models.generate.sampling_config import Sampling
from models.transformer import Transformer
from training.mesh import Layout
from training.samples import Sampler


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What is written after which prompts.

    Attributes:
        tokenizer: URL of tokenizer.json.
        prompts: texts to go on from; an empty one begins a document.
        new_tokens: to add at most.
        temperature: 0 takes the most likely token every time.
        top_k: sample among the k most likely only; None for all.
        top_p: sample among the likeliest that together have this probability; None for all.
        seed: of the draws; the same at every checkpoint.
    """

    tokenizer: str
    prompts: tuple[str, ...]
    new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float | None = None
    seed: int = 0


class Writer:
    """Writes after the prompts with whatever parameters it is given; compiled once.

    Args:
        prompts: what to write after.
        config: shape of the model.
        layout: where its parameters are.
        compute_dtype: dtype of products.

    Raises:
        InputError: a prompt is too long for the model, or not Unicode.
    """

    def __init__(
        self, prompts: Prompts, config: TransformerConfig, layout: Layout, compute_dtype: str
    ) -> None:
        self._prompts = prompts.prompts
        self._tokenizer = TextTokenizer.load(prompts.tokenizer)
        self._sampler = Sampler(
            config,
            layout,
            [prompt_ids(self._tokenizer, text) for text in prompts.prompts],
            new_tokens=prompts.new_tokens,
            compute_dtype=compute_dtype,
            sampling=Sampling(
                temperature=prompts.temperature,
                top_k=prompts.top_k,
                top_p=prompts.top_p,
                seed=prompts.seed,
            ),
            eos_id=self._tokenizer.eos_id,
        )

    def __call__(self, model: Transformer) -> list[dict[str, str]]:
        """{"prompt", "completion"} for each; every process calls it and gets the same.

        Args:
            model: float32 parameters on the layout.
        """
        eos = self._tokenizer.eos_id
        return [
            {"prompt": prompt, "completion": self._tokenizer.decode([i for i in ids if i != eos])}
            for prompt, ids in zip(self._prompts, self._sampler(model), strict=True)
        ]
