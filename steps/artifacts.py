"""What steps hand to each other: a place in the store, and the code that opens it.

Importing this file costs nothing; what a method needs (numpy, tokenizers, jax) is imported when
the method is called.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline import Artifact, storage

if TYPE_CHECKING:
    import numpy as np

    from data.tokenizer import TextTokenizer

TRAIN, VALIDATION = "train", "validation"
Shards = tuple[tuple[str, int], ...]


class Documents(Artifact):
    """Sampled documents: Parquet (id, text, token_count), one file per shard and split."""

    def files(self, split: str) -> list[tuple[str, str]]:
        """(shard name, URL) of every file of a split, in source order."""
        return [
            (shard.name, storage.join(self.home, shard.root, f"{split}.parquet"))
            for shard in self.shards("sample/")
            if any(file.path == f"{split}.parquet" for file in shard.files)
        ]


class Tokenizer(Artifact):
    """A byte-level BPE tokenizer in `tokenizers`' own tokenizer.json."""

    @property
    def file(self) -> str:
        """URL of tokenizer.json."""
        return storage.join(self.shard("tokenizer"), "tokenizer.json")

    def load(self) -> TextTokenizer:
        """The tokenizer, ready to encode and decode."""
        from data.tokenizer import TextTokenizer

        return TextTokenizer.load(self.file)


class TokenCache(Artifact):
    """Token ids in TensorStore, a shard of documents at a time; see `data/cache.py`."""

    def split(self, name: str) -> Shards:
        """(directory, tokens) of the shards of a split, in document order."""
        return tuple(
            (storage.join(self.home, shard.root, "cache"), shard.result["tokens"])
            for shard in self.shards(f"{name}/")
        )

    def tokens(self, split: str) -> int:
        """Tokens in a split, EOS included."""
        return sum(count for _, count in self.split(split))

    @property
    def token_bytes_file(self) -> str:
        """URL of a JSON list: UTF-8 bytes each id stands for."""
        return storage.join(self.shard("vocabulary"), "token_bytes.json")

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab]: UTF-8 bytes each id stands for, 0 for EOS."""
        import numpy as np

        return np.asarray(storage.read_json(self.token_bytes_file), np.int32)


class Sequences(Artifact):
    """A token cache seen as shuffled training sequences: an order, not a copy."""

    opens = ("tokens",)

    @property
    def cache(self) -> TokenCache:
        """The tokens the order is over."""
        return self.input("tokens", TokenCache)


class Checkpoint(Artifact):
    """A trained model and the record of its training."""

    opens = ("sequences",)

    @property
    def sequences(self) -> Sequences:
        """What it was trained on."""
        return self.input("sequences", Sequences)

    @property
    def final(self) -> str:
        """URL of the last checkpoint's directory."""
        return self.shard(self.result["checkpoint"])

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of `history` (a row a step) or `evaluations` (a row an evaluation)."""
        data = storage.read_bytes(storage.join(self.shard("record"), f"{name}.jsonl"))
        return [json.loads(line) for line in data.decode().splitlines()]


class Scores(Artifact):
    """What a model scores on held-out text; the numbers are the result."""


class Completions(Artifact):
    """Text a model wrote; prompts and completions are in the result."""


class Report(Artifact):
    """A page to look at."""

    @property
    def file(self) -> str:
        """URL of the HTML file."""
        return storage.join(self.shard("page"), "index.html")
