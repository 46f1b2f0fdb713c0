"""Load a trained model in three lines of Python, on the first device that JAX finds.

model = load("runs/train-0123456789")
print(model.generate("The three laws of"))
logits = model(model.encode("The three"))
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pipeline import InputError
from steps.artifacts import Checkpoint
from steps.checkpoints.find import Trained, find, open_model, open_tokenizer

if TYPE_CHECKING:
    import numpy as np

    from data.tokenizer.text_tokenizer import TextTokenizer
    from models.transformer import Transformer


class LanguageModel:
    """A trained model and its tokenizer.

    Attributes:
        trained: the checkpoint's step, the model's shape and the training's sequence length.
        tokenizer: None for a model of rows of integers.
        network: the model on the first device, in float32 on a CPU and else in the compute dtype.
    """

    def __init__(
        self, trained: Trained, tokenizer: TextTokenizer | None, network: Transformer
    ) -> None:
        self.trained = trained
        self.tokenizer = tokenizer
        self.network = network

    def encode(self, text: str) -> list[int]:
        """Ids of a text that begins a document: BOS, then the text's.

        Raises `InputError` for a lone surrogate, which UTF-8 cannot express, or without tokenizer.
        """
        return self._need_tokenizer().prompt_ids(text)

    def _need_tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise InputError(
                f"{self.trained.path}: expected a tokenizer, this model was trained on rows of "
                "integers; call model(ids), or load it with tokenizer=FILE"
            )
        return self.tokenizer

    def __call__(self, tokens: Any) -> np.ndarray:
        """Float32 logits [..., position, vocab] of the token after each of ids [..., position].

        Raises `InputError`: there is no token, an id is not in the vocabulary, or there are more
        tokens than the model's learned positions.
        """
        import numpy as np

        from models.generate.generate import next_token_logits

        given = np.asarray(tokens)
        if given.ndim not in (1, 2) or given.dtype.kind not in "iu" or not given.size:
            raise InputError(
                "model(tokens): expected at least one whole number, as [position] or [batch, "
                f"position], found {given.dtype} of shape {given.shape}; model.encode(text) gives "
                "the ids of a text"
            )
        rows = given.reshape(-1, given.shape[-1])
        return next_token_logits(self.network, rows).reshape(*given.shape, -1)

    def generate(
        self,
        text: str,
        *,
        new_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int | None = 40,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """The model's continuation of `text`, up to the end of the document.

        An empty text begins a document. For the other arguments see
        `models.generate.sampling_config.Sampling`; a temperature of 0 is greedy.

        Raises `InputError`: an argument is out of its range, the text is too long for the model's
        learned positions, or there is no tokenizer.
        """
        from models.generate.generate import generate
        from models.generate.sampling_config import Sampling

        tokenizer, prompt = self._need_tokenizer(), self.encode(text)
        (ids,) = generate(
            self.network,
            [prompt],
            new_tokens=new_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            eos_id=tokenizer.eos_id,
        )
        return tokenizer.continuation(ids, prompt)


def load(
    model: str | os.PathLike[str] | Checkpoint, *, tokenizer: str | None = None
) -> LanguageModel:
    """A trained model with its tokenizer, ready for use.

    Args:
        model: path or URL of the directory of a train step, finished or not, or of a checkpoint in
            it; or the artifact of a step that trains.
        tokenizer: URL of a tokenizer.json or of its directory, instead of the one of training.

    Raises `InputError` if there is no model, or `tokenizer` is not this model's, and
    `CorruptOutput` if files are missing or changed.
    """
    trained = find(model.path if isinstance(model, Checkpoint) else os.fspath(model))
    has_text = tokenizer is not None or trained.has_text
    opened = open_tokenizer(trained, tokenizer) if has_text else None
    network = open_model(trained.path, trained.model, trained.compute_dtype)
    return LanguageModel(trained, opened, network)
