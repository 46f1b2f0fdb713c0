"""What steps hand to each other: a place in the store, and the code that opens it.

Importing this file costs nothing; what a method needs (numpy, tokenizers, jax) is imported when
the method is called.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from models.config import TransformerConfig
from pipeline import Artifact, InputError
from pipeline.store import storage
from training.config import TrainConfig

if TYPE_CHECKING:
    import numpy as np

    from data.batches.dataset import DatasetSpec, Source
    from data.cache.token_shard import TokenShard
    from data.tokenizer.text_tokenizer import TextTokenizer

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_VOCABULARY = "vocabulary"  # the shard of a token cache that is no split


class Documents(Artifact):
    """Sampled documents: Parquet (id, text, token_count), one file per shard and split."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits with documents: train, then the held-out ones as they were named."""
        described = self.result["splits"]
        return tuple(name for name in self.result["order"] if described[name]["documents"])

    def files(self, split: str) -> list[tuple[str, str]]:
        """(shard name, URL) of every file of a split, in source order.

        A shard that was written again without duplicates keeps its name, and the file is the new.
        """
        unique = {shard.name: shard for shard in self.shards("unique/")}
        found = []
        for shard in self.shards("sample/"):
            last = unique.get(f"unique/{shard.name.removeprefix('sample/')}", shard)
            if split in last.result["splits"]:
                found.append((shard.name, storage.join(self.home, last.root, f"{split}.parquet")))
        return found


class Tokenizer(Artifact):
    """A byte-level BPE tokenizer in `tokenizers`' own tokenizer.json."""

    @property
    def file(self) -> str:
        """URL of tokenizer.json."""
        return storage.join(self.shard("tokenizer"), "tokenizer.json")

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return self.result.get("digest") or self.load().digest

    def load(self) -> TextTokenizer:
        """The tokenizer, ready to encode and decode."""
        from data.tokenizer.text_tokenizer import TextTokenizer

        return TextTokenizer.load(self.file)


class TokenCache(Artifact):
    """Token ids in TensorStore, a chunk of documents to a shard; see `data/cache/token_shard.py`.

    A packed one holds training tokens only, and opens the cache it was packed from for the rest.
    """

    opens = ("tokens",)

    @property
    def packed(self) -> bool:
        """Whether training shards hold whole rows of `result["sequence_length"]`, padded."""
        return "tokens" in self.input_paths

    @property
    def masked(self) -> bool:
        """Whether ids are stored with a loss mask, see `training.step.document_mask`."""
        return self.result.get("masked", False)

    def _of(self, split: str) -> TokenCache:
        """The cache that holds a split."""
        return self if split == TRAIN or not self.packed else self._unpacked

    @property
    def _unpacked(self) -> TokenCache:
        return self.input("tokens", TokenCache) if self.packed else self

    def split(self, name: str) -> tuple[TokenShard, ...]:
        """The shards of a split, in document order."""
        from data.cache.token_shard import TokenShard

        cache = self._of(name)
        return tuple(
            TokenShard(
                storage.join(cache.home, shard.root, "cache"),
                shard.result["tokens"],
                shard.result["check"],
            )
            for shard in cache.shards(f"{name}/")
        )

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        """Names of the splits with tokens that are not for training; validation is the first."""
        parts = {shard.name.partition("/")[0] for shard in self._unpacked.shards()}
        found = [name for name in sorted(parts - {TRAIN, _VOCABULARY}) if self.tokens(name)]
        return tuple(sorted(found, key=lambda name: name != VALIDATION))

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """The held-out splits that may be looked at while training: all but "test"."""
        return tuple(name for name in self.held_out_splits if name != TEST)

    def held_out(self, names: tuple[str, ...]) -> tuple[tuple[str, tuple[TokenShard, ...]], ...]:
        """Name and shards of the held-out splits `names`.

        Raises:
            InputError: for a name of no such split.
        """
        there = self.held_out_splits
        if missing := [name for name in names if name not in there]:
            raise InputError(
                f"{self.path}: no held-out split {missing[0]!r}; there are {', '.join(there)}"
            )
        return tuple((name, self.split(name)) for name in names)

    def tokens(self, split: str) -> int:
        """Tokens in a split, EOS included."""
        return sum(shard.result["tokens"] for shard in self._of(split).shards(f"{split}/"))

    @property
    def token_bytes_file(self) -> str:
        """URL of a JSON list: UTF-8 bytes each id stands for."""
        return storage.join(self._unpacked.shard(_VOCABULARY), "token_bytes.json")

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab]: UTF-8 bytes each id stands for, 0 for EOS."""
        import numpy as np

        return np.asarray(storage.read_json(self.token_bytes_file), np.int32)


class Sequences(Artifact):
    """A token cache seen as shuffled training sequences, or several of them by weight.

    An order, not a copy: what is read are the caches. What is not training (validation tokens,
    vocabulary) is the first cache's.
    """

    opens = ("tokens", "sequences")

    @property
    def parts(self) -> list[Sequences]:
        """The inputs of a mixture, in order; none for the sequences of one cache."""
        return self.inputs("sequences", Sequences)

    @property
    def cache(self) -> TokenCache:
        """The tokens the order is over; the first ones of a mixture."""
        parts = self.parts
        return parts[0].cache if parts else self.input("tokens", TokenCache)

    @property
    def padded(self) -> bool:
        """Whether sequences may end in padding."""
        return any(part.cache.packed for part in (self.parts or [self]))

    def source(self) -> Source:
        """One cache's training shards and their order."""
        from data.batches.dataset import Source

        return Source(
            name=self.cache.path.rstrip("/").rpartition("/")[2],
            shards=self.cache.split(TRAIN),
            **{name: self.result[name] for name in ("io_block_size", "window_blocks", "seed")},
        )

    def dataset(self) -> DatasetSpec:
        """What `data.batches.dataset.Dataset` reads: plain data, to be sent to other processes."""
        from data.batches.dataset import DatasetSpec
        from data.batches.mixture import MixturePhase

        cache = self.cache.result
        stages = self.result.get("stages", ())
        return DatasetSpec(
            sources=tuple(part.source() for part in (self.parts or [self])),
            stages=tuple(
                MixturePhase(start=s["start"], weights=tuple(s["weights"])) for s in stages
            ),
            sequence_length=self.result["sequence_length"],
            vocab_size=cache["vocab_size"],
            eos_id=cache["eos_id"],
            tokenizer=cache["tokenizer"],
            seed=self.result["seed"],
            masked=self.cache.masked,
        )


class Checkpoint(Artifact):
    """A trained model and the record of its training, or a model that was imported."""

    opens = ("sequences",)

    @property
    def imported(self) -> bool:
        """Whether it came from another project, with a tokenizer and without a training."""
        return "imported" in self.result

    @property
    def own_tokenizer(self) -> Tokenizer:
        """The tokenizer that an imported model came with."""
        return Tokenizer(self.path, self.manifest)

    @property
    def sequences(self) -> Sequences:
        """What it was trained on. Raises `InputError` for a model that was imported."""
        if self.imported:
            raise InputError(
                f"{self.path}: it was imported and has no sequences of its own; give "
                "evaluate tokens, train on with warm_start"
            )
        return self.input("sequences", Sequences)

    @property
    def model(self) -> TransformerConfig:
        """Shape of the model."""
        return TransformerConfig.from_plain(self.result["model"])

    @property
    def train(self) -> TrainConfig:
        """How it was trained, runtime settings included."""
        runtime = self.result.get("measured", {}).get("runtime", {})
        return TrainConfig.from_plain({**runtime, **self.result["train"]})

    @property
    def trained_on(self) -> str:
        """The hardware that was asked for and what JAX calls it: "v6e-16: 16 x TPU v6 lite"."""
        measured = self.result["measured"]
        return ": ".join(measured[name] for name in ("hardware", "devices") if name in measured)

    @property
    def final(self) -> str:
        """URL of the last checkpoint's directory."""
        return self.shard(self.result["checkpoint"])

    @property
    def steps(self) -> dict[int, str]:
        """URL of every checkpoint that was kept, by the steps it has done, in rising order."""
        kept = {
            s.result["step"]: storage.join(self.home, s.root) for s in self.shards("checkpoint/")
        }
        return dict(sorted(kept.items()))

    def at(self, step: int | None) -> str:
        """URL of the checkpoint of `step`, the last one for None.

        Raises:
            InputError: when there is none of that step.
        """
        if step is None:
            return self.final
        if step not in self.steps:
            raise InputError(
                f"{self.path}: no checkpoint of step {step}; there are {list(self.steps)}"
            )
        return self.steps[step]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of `history` (one a step), `evaluations` (one a set) or `samples` (one a prompt)."""
        return self.tables()[name]

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of the whole run by table, from its `metrics.jsonl`.

        Raises:
            InputError: it was imported, so no run of ours trained it.
        """
        if self.imported:
            raise InputError(f"{self.path}: it was imported and has no record of its training")
        from training.metrics.history import read_log, tables

        return tables(read_log(self.shard("record")))

    @property
    def journals(self) -> list[dict[str, Any]]:
        """Accounts of the attempts as plain mappings, see `training.metrics.journal`."""
        data = storage.read_bytes(storage.join(self.shard("record"), "journals.jsonl"))
        return [json.loads(line) for line in data.decode().splitlines()]


class HuggingFaceModel(Artifact):
    """A model as `transformers` and what reads its files load it."""

    @property
    def folder(self) -> str:
        """URL of the directory with config.json, safetensors and tokenizer.json."""
        return self.shard("model")


class GgufModel(Artifact):
    """A model as a GGUF file, which llama.cpp and what is built on it load."""

    @property
    def file(self) -> str:
        """URL of the file."""
        return storage.join(self.shard("gguf"), self.result["file"])


class Scores(Artifact):
    """What a model, or every checkpoint of its training, scores; the numbers are the result."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows with step, set, loss, bits_per_byte, tokens and bytes, by step and set.

        None of a step that asks questions and nothing else.
        """
        return self.result.get("rows", [])

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Rows with task and its metrics, such as acc and acc_stderr."""
        found = self.result.get("tasks")
        if found is None:  # a file of questions: the metrics are the result
            metrics = {k: v for k, v in self.result.items() if isinstance(v, int | float)}
            return [{"task": self.manifest.label, **metrics}] if "items" in metrics else []
        if isinstance(found, dict):
            return [{"task": task, **metrics} for task, metrics in found.items()]
        return found

    def samples(self) -> list[dict[str, Any]]:
        """What the scored checkpoints wrote: step, prompt and completion, by step."""
        if "samples" in self.result:
            step = {"step": self.rows[0]["step"]}
            return [{**step, **sample} for sample in self.result["samples"]]
        urls = [
            storage.join(self.home, shard.root, "scores.json") for shard in self.shards("score/")
        ]
        return [sample for url in urls for sample in storage.read_json(url)["samples"]]


class Completions(Artifact):
    """Text a model wrote; prompts and completions are in the result."""


class Report(Artifact):
    """A page to look at."""

    @property
    def page(self) -> str:
        """URL of the HTML file."""
        return storage.join(self.shard("page"), "index.html")
