"""The artifacts that steps pass to each other: handles of outputs, with the code that opens them.

Importing this file is cheap: methods import what they need (numpy, tokenizers, jax) when called.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models.shape.config import TransformerConfig
from pipeline import Artifact, InputError
from pipeline.store import storage
from pipeline.store.parallel import concurrently
from steps.measured import Measured
from training.config import TrainConfig

if TYPE_CHECKING:
    import numpy as np

    from data.batches.dataset import DatasetSpec, TokenSource
    from data.cache.token_shard import TokenShard
    from data.tokenizer.text_tokenizer import TextTokenizer
    from training.metrics.goodput import AttemptTime

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_VOCABULARY = "vocabulary"  # the one shard of a token cache that belongs to no split


class Documents(Artifact):
    """Parquet (id, text, token_count and others), one file per shard and split.

    `sample` names its shards sample/NNNNNN, all other steps documents/NNNNNN.
    """

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that have documents: train, then held-out ones in declared order."""
        described = self.result["splits"]
        return tuple(name for name in self.result["order"] if described[name]["documents"])

    def files(self, split: str) -> list[tuple[str, str]]:
        """(shard name, URL) of every file of a split, in source order."""
        parts = self.parts()
        return [(name, files[split]) for name, files in parts.items() if split in files]

    def parts(self) -> dict[str, dict[str, str]]:
        """URLs of each shard's files by split, by the name of the shard, in source order.

        A shard that was rewritten without duplicates keeps its name.
        """
        unique = {shard.name: shard for shard in self.shards("unique/")}
        found = {}
        for shard in (*self.shards("sample/"), *self.shards("documents/")):
            last = unique.get(f"unique/{shard.name.removeprefix('sample/')}", shard)
            found[shard.name] = {
                split: storage.join(self.home, last.root, f"{split}.parquet")
                for split in last.result["splits"]
            }
        return found


class Tokenizer(Artifact):
    """A tokenizer as a tokenizer.json of the `tokenizers` library."""

    @property
    def file(self) -> str:
        """URL of tokenizer.json."""
        return storage.join(self.shard("tokenizer"), "tokenizer.json")

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return self.result.get("digest") or self.load().digest

    def load(self) -> TextTokenizer:
        """Ready to encode and decode."""
        from data.tokenizer.text_tokenizer import TextTokenizer

        return TextTokenizer.load(self.file)


class TokenCache(Artifact):
    """Token ids in TensorStore, one shard per chunk of documents; see `data/cache/token_shard.py`.

    A packed cache holds training tokens only and opens the cache it was packed from for the rest.
    """

    opens = ("tokens",)
    needs = ("tokenizer",)

    @property
    def packed(self) -> bool:
        """Whether training shards hold whole padded sequences of `result["sequence_length"]`."""
        return "tokens" in self.input_paths

    @property
    def masked(self) -> bool:
        """Whether ids are stored with a loss mask, see `training.step.train_step`."""
        return self.result.get("masked", False)

    @property
    def begins(self) -> bool:
        """Whether rows hold conversations, whose begins are in the stored ids."""
        return self.result.get("begins", False)

    def _of(self, split: str) -> TokenCache:
        return self if split == TRAIN else self.unpacked

    @cached_property
    def unpacked(self) -> TokenCache:
        """The cache before packing."""
        return self.input("tokens", TokenCache) if self.packed else self

    @property
    def has_text(self) -> bool:
        """Whether a tokenizer made the tokens; they are rows of integers if not."""
        return "tokenizer" in self.unpacked.input_paths

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. Raises `InputError` if none did."""
        if not self.has_text:
            raise InputError(
                f"{self.path}: these tokens were not made by a tokenizer's step; give a "
                "tokenizer.json with --tokenizer FILE"
            )
        return self.unpacked.input("tokenizer", Tokenizer)

    def split(self, name: str) -> tuple[TokenShard, ...]:
        """The shards of a split, in document order."""
        from data.cache.token_shard import TokenShard

        cache = self._of(name)
        return tuple(
            TokenShard(
                storage.join(cache.home, s.root, "cache"), s.result["tokens"], s.result["check"]
            )
            for s in cache.each_shard(f"{name}/")
        )

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        """Names of the splits other than train that have tokens; validation comes first."""
        parts = {shard.name.partition("/")[0] for shard in self.unpacked.each_shard()}
        found = [name for name in sorted(parts - {TRAIN, _VOCABULARY}) if self.tokens(name)]
        return tuple(sorted(found, key=lambda name: name != VALIDATION))

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """The held-out splits to evaluate on during training: all but "test"."""
        return tuple(name for name in self.held_out_splits if name != TEST)

    def named_splits(
        self, names: tuple[str, ...]
    ) -> tuple[tuple[str, tuple[TokenShard, ...]], ...]:
        """Name and shards of the held-out splits `names`; `InputError` for any other name."""
        known = self.held_out_splits
        if missing := [name for name in names if name not in known]:
            raise InputError(
                f"{self.path}: no held-out split {missing[0]!r}; it has {', '.join(known)}"
            )
        return tuple((name, self.split(name)) for name in names)

    def tokens(self, split: str) -> int:
        """Tokens in a split, EOS included."""
        return sum(shard.result["tokens"] for shard in self._of(split).each_shard(f"{split}/"))

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab]: number of UTF-8 bytes of each id, 0 for EOS."""
        import numpy as np

        directory = self.unpacked.shard(_VOCABULARY)
        return np.asarray(storage.read_json(f"{directory}/token_bytes.json"), np.int32)


class Sequences(Artifact):
    """Shuffled training sequences of one token cache, or a weighted mixture of several caches.

    It records an order and copies no tokens: training reads the caches. Everything else (validation
    tokens, vocabulary) comes from the first cache.
    """

    opens = ("tokens", "sequences", "order")

    @cached_property
    def order(self) -> Sequences | None:
        """The sequences that these are without some documents, see `steps.without`."""
        return self.input("order", Sequences) if "order" in self.input_paths else None

    @cached_property
    def parts(self) -> list[Sequences]:
        """The inputs of a mixture, in order; empty for the sequences of one cache."""
        return self.inputs("sequences", Sequences) if self.order is None else self.order.parts

    @cached_property
    def cache(self) -> TokenCache:
        """The token cache that is shuffled; the first one of a mixture."""
        above = self.order or next(iter(self.parts), None)
        return self.input("tokens", TokenCache) if above is None else above.cache

    @property
    def padded(self) -> bool:
        """Whether sequences may end in padding."""
        return any(part.cache.packed for part in (self.parts or [self]))

    def source(self) -> TokenSource:
        """One cache's training shards and their order."""
        from data.batches.dataset import TokenSource

        return TokenSource(
            name=self.cache.path.rstrip("/").rpartition("/")[2],
            shards=self.cache.split(TRAIN),
            **{name: self.result[name] for name in ("io_block_size", "window_blocks", "seed")},
        )

    def dataset(self) -> DatasetSpec:
        """The spec that `data.batches.dataset.Dataset` reads: plain data that can be pickled."""
        from data.batches.dataset import DatasetSpec
        from data.batches.mixture import MixturePhase

        if self.order is not None:
            return replace(self.order.dataset(), moved=(*map(tuple, self.result["moved"]),))
        cache = self.cache.result
        phases = self.result["phases"] if self.parts else ()
        return DatasetSpec(
            sources=tuple(part.source() for part in (self.parts or [self])),
            phases=tuple(MixturePhase(start=s["start"], weights=(*s["weights"],)) for s in phases),
            sequence_length=self.result["sequence_length"],
            vocab_size=cache["vocab_size"],
            eos_id=cache["eos_id"],
            tokenizer=cache["tokenizer"],
            seed=self.result["seed"],
            masked=self.cache.masked,
            begins=self.cache.begins,
        )


class Checkpoint(Measured):
    """A trained model with the record of its training, or an imported model."""

    opens = ("sequences",)
    last = "last."

    @property
    def imported(self) -> bool:
        """Whether the model is from another project: it has a tokenizer and no training record."""
        return "imported" in self.result

    @property
    def has_text(self) -> bool:
        """Whether the model has a tokenizer, as all but those of rows of integers have."""
        return self.imported or self.sequences.cache.has_text

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training text, or the one that an imported model came with.

        Raises `InputError` if the model has none.
        """
        if self.imported:
            return Tokenizer(self.path, self.manifest)
        return self.sequences.cache.tokenizer()

    @property
    def sequences(self) -> Sequences:
        """The training data. Raises `InputError` for an imported model."""
        if self.imported:
            raise InputError(
                f"{self.path}: it was imported and has no sequences of its own; give "
                "evaluate tokens, train on with warm_start"
            )
        return self.input("sequences", Sequences)

    @property
    def model(self) -> TransformerConfig:
        return TransformerConfig.from_plain(self.result["model"])

    @property
    def train(self) -> TrainConfig:
        """The training configuration, runtime settings included."""
        runtime = self.result.get("measured", {}).get("runtime", {})
        return TrainConfig.from_plain({**runtime, **self.result["train"]})

    @property
    def first_steps(self) -> int:
        """Steps that the run was declared to do when it began at step 0, before extensions."""
        return self.result.get("first_steps", self.train.steps)

    @property
    def trained_on(self) -> str:
        """The requested hardware and JAX's name of it: "v6e-16: 16 x TPU v6 lite"."""
        measured = self.result["measured"]
        return ": ".join(measured[name] for name in ("hardware", "devices") if name in measured)

    @property
    def final(self) -> str:
        return self.shard(self.result["checkpoint"])

    @property
    def steps(self) -> dict[int, str]:
        """URL of every checkpoint that was kept, by step, in ascending order."""
        shards = self.shards("checkpoint/")
        return dict(sorted((s.result["step"], storage.join(self.home, s.root)) for s in shards))

    def at(self, step: int | None) -> str:
        """URL of the checkpoint of `step`, or of the last one; `InputError` if it was not kept."""
        if step is None:
            return self.final
        kept = self.steps
        if step not in kept:
            raise InputError(f"{self.path}: no checkpoint of step {step}; there are {list(kept)}")
        return kept[step]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of "history" (one per step), "evaluations" (per split) or "samples" (per prompt)."""
        return self.tables()[name]

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of the run by table; `InputError` of an import."""
        if self.imported:
            raise InputError(f"{self.path}: it was imported and has no record of its training")
        from training.metrics.metrics_log import read_log, tables

        return tables(read_log(self.shard("record")))

    @property
    def attempts(self) -> list[AttemptTime]:
        """The attempts at the run with their times; none of a run of an older version."""
        import msgspec

        from training.metrics.goodput import AttemptTime
        from training.metrics.metrics_log import read_log

        rows = read_log(self.shard("record"), kinds=["attempt"])
        return [msgspec.convert(row, AttemptTime) for row in rows]


class HuggingFaceModel(Artifact):
    """A model as a folder for Hugging Face `transformers` and compatible programs."""

    @property
    def folder(self) -> str:
        """URL of the directory with config.json, safetensors and tokenizer.json."""
        return self.shard("model")


class GgufModel(Artifact):
    """A model as a GGUF file for llama.cpp and programs built on it."""

    @property
    def file(self) -> str:
        """URL of the file."""
        return storage.join(self.shard("gguf"), self.result["file"])


class Scores(Measured):
    """Scores of a model, or of every checkpoint of its training; the result has the numbers."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows with step, split, loss, bits_per_byte, tokens and bytes; empty for tasks only."""
        return self.result.get("rows", [])

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Rows with task and its metrics, such as acc and acc_stderr."""
        found = self.result.get("tasks")
        if found is None:  # `multiple_choice`: the metrics are the result itself
            metrics = {k: v for k, v in self.result.items() if isinstance(v, int | float)}
            return [{"task": self.manifest.label, **metrics}] if "items" in metrics else []
        if isinstance(found, dict):
            return [{"task": task, **metrics} for task, metrics in found.items()]
        return found

    def samples(self) -> list[dict[str, Any]]:
        """Generated samples of the scored checkpoints: step, prompt and completion, by step."""
        if "samples" in self.result:
            step = {"step": self.rows[0]["step"]}
            return [{**step, **sample} for sample in self.result["samples"]]
        urls = [storage.join(self.home, s.root, "scores.json") for s in self.shards("score/")]
        scores = concurrently(storage.read_json, urls, self.home)
        return [sample for score in scores for sample in score["samples"]]


class Completions(Artifact):
    """Text that a model generated; the result has prompts and completions."""


class Report(Artifact):
    """An HTML page."""

    @property
    def page(self) -> str:
        """URL of the HTML file."""
        return storage.join(self.shard("page"), "index.html")
