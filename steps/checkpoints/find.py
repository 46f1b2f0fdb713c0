"""Find a checkpoint by its directory, and load it without the graph that produced it.

The manifest of a finished train step has the configuration of its model and the sequences of its
training. A step that is still running, or was interrupted, has no manifest; its shard `about`,
which is finished before training begins, has the same data.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.shape.config import TransformerConfig
from pipeline import InputError, StepContext
from pipeline.errors import CorruptOutput
from pipeline.store import storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest, load, make_ref, resolve_ref
from pipeline.store.shards import ATTEMPTS, Shard
from steps.artifacts import Checkpoint, Sequences, TokenCache, Tokenizer
from training.config import TrainConfig

if TYPE_CHECKING:
    from data.tokenizer.text_tokenizer import TextTokenizer
    from models.transformer import Transformer

ABOUT = "about"
CHECKPOINTS = "checkpoint/"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Trained:
    """A committed checkpoint."""

    path: str
    step: int
    finished: bool  # whether its train step is published
    model: TransformerConfig
    sequence_length: int  # of its training, as the next
    compute_dtype: str
    sequences: str | None  # directory of the training sequences; None for an imported model
    root: str  # its step's directory

    @property
    def has_text(self) -> bool:
        """Whether the model has a tokenizer, see `Checkpoint.has_text`."""
        return self.text_source.has_text

    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`; the step of this one need not be finished."""
        return self.text_source.tokenizer()

    @property
    def text_source(self) -> Checkpoint | TokenCache:
        """The imported model, or the token cache of its training."""
        if self.sequences is None:
            return Checkpoint(self.root, _published(self.root))
        return Sequences(self.sequences, _published(self.sequences)).cache


def is_run(published: Manifest) -> bool:
    """Whether an output is a training run, or a selection of one."""
    return {"checkpoint", "model", "train"} <= published.result.keys()


@dataclass(frozen=True)
class Continued:
    """The training or imported model in the directory `path`, from whose checkpoint a run begins.

    Attributes:
        at: step of the checkpoint; None for the last one.
        extends: whether it is the same run with its steps and data, and not a new one.
    """

    path: str
    at: int | None
    extends: bool


def describe(
    run: StepContext,
    sequences: Sequences,
    model: TransformerConfig,
    train: TrainConfig,
    continued: Continued | None = None,
) -> None:
    """Record the model and the training of this step's checkpoints, before training begins."""
    if run.claim(ABOUT):  # not `finished`: other code of the step may have written it
        run.declare(ABOUT)
        return
    about = {
        "model": dataclasses.asdict(model),
        "train": dataclasses.asdict(train),
        "sequences": make_ref(run.root, sequences.path),
    }
    if continued is not None:
        path = make_ref(run.root, continued.path)
        about["continued"] = dataclasses.asdict(dataclasses.replace(continued, path=path))
    # The content digest covers the sequences' content and not the URLs of directories.
    content = {"content": sequences.manifest.content}
    with run.shard(ABOUT, content) as directory:
        storage.write_atomic(storage.join(directory, "about.json"), json.dumps(about).encode())


def open_model(path: str, config: TransformerConfig, dtype: str) -> Transformer:
    """The model of a checkpoint on the first device, in the compute dtype of its training.

    A CPU, which is no faster in bfloat16, uses float32.
    """
    import jax
    import jax.numpy as jnp

    from models.layers.norms import cast
    from training.checkpoint.restore import load_model

    compute = "float32" if jax.default_backend() == "cpu" else dtype
    return cast(load_model(path, config), jnp.dtype(compute))


def open_tokenizer(trained: Trained, file: str | None = None) -> TextTokenizer:
    """The tokenizer of training, or the one in `file`, a tokenizer.json or a directory with one."""
    return read_tokenizer(file or trained.tokenizer().file, trained.model)


def read_tokenizer(file: str, model: TransformerConfig) -> TextTokenizer:
    """The tokenizer in a tokenizer.json or a directory with one, if it has the model's ids."""
    from data.tokenizer.text_tokenizer import TextTokenizer

    inside = storage.join(file, _TOKENIZER)
    try:
        tokenizer = TextTokenizer.load(inside if storage.exists(inside) else file)
    except IsADirectoryError as error:
        raise InputError(f"{file}: found a directory without a {_TOKENIZER}; give one") from error
    if tokenizer.vocab_size != model.vocab_size:
        raise InputError(
            f"{file}: the tokenizer has {tokenizer.vocab_size} ids and the model "
            f"{model.vocab_size}; give the tokenizer it was trained with"
        )
    return tokenizer


def tokenizer_digest(made: Checkpoint | TokenCache) -> str:
    """SHA-256 of the tokenizer of a model or of tokens; empty if it has none, or none is known."""
    if isinstance(made, TokenCache):
        return made.result["tokenizer"]
    if made.imported:
        return made.tokenizer().digest
    # The manifest of an adopted output may lack its inputs.
    return tokenizer_digest(made.sequences.cache) if "sequences" in made.input_paths else ""


def check_tokenizer(step: str, model: Checkpoint | TokenCache, tokens: TokenCache) -> None:
    """Refuse tokens that another tokenizer than the model's produced.

    `model` is the model or the token cache of its training.
    """
    mine, theirs, how = tokenizer_digest(tokens), tokenizer_digest(model), ""
    if mine == theirs:
        return
    if model.has_text and tokens.has_text:
        own = model.tokenizer().load()
        # Another program may write an equal tokenizer as different bytes, with another digest.
        if own.gives_ids_of(tokens.tokenizer().load()):
            return
        bos, eos = own.decode([own.bos_id]), own.decode([own.eos_id])
        how = f": steps.tokenizer(its tokenizer.json, bos={bos!r}, eos={eos!r})"
    raise InputError(
        f"{step}: the model's tokenizer has digest {theirs[:12]}, that of the tokens "
        f"{mine[:12]}; tokenize the documents with the model's tokenizer{how}"
    )


def too_long(tokens: int, trained: int) -> str:
    """A warning about a text of more tokens than the model was trained on; empty for others."""
    if tokens <= trained:
        return ""
    return (
        f"up to {tokens:,} tokens are more than the {trained:,} the model was trained on; what "
        "comes after those may make no sense"
    )


def find(url: str) -> Trained:
    """The newest checkpoint in the directory of a train step, finished or not, or the committed
    checkpoint of which `url` is the directory."""
    url = storage.normalise(url)
    root, inside, _ = url.rpartition(f"/{ATTEMPTS}/")
    root = root if inside else url
    published = published_in(root)
    found = [] if published is None else _of_manifest(root, published)
    if published is None or (inside and url not in [candidate.path for candidate in found]):
        # The checkpoint may be of a later build that has not replaced the published output yet.
        found += _of_ledgers(root)
    if not inside and not found:
        raise InputError(_nothing(root))
    for candidate in found if inside else found[-1:]:
        if not inside or candidate.path == url:
            return candidate.trained()
    paths = ", ".join(candidate.path for candidate in found) or "none"
    raise InputError(
        f"{url}: not a committed checkpoint of its step; there are {paths}; give one of them, or "
        "the step's directory for the newest"
    )


def published_in(url: str) -> Manifest | None:
    """The manifest in the directory of a step, None if it is not finished; refuses a file."""
    try:
        return load(url)
    except NotADirectoryError as error:
        raise InputError(f"{url}: expected a directory, found a file; give its step's") from error


def builds_of(root: str) -> list[Ledger]:
    """The ledgers of all builds that were begun in the directory of a step."""
    return [Ledger(root, build) for build in storage.list_names(storage.join(root, LEDGER))]


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint, and the record of its step: published, or still a ledger."""

    path: str
    shard: Shard
    root: str
    record: Manifest | Ledger

    @property
    def age(self) -> tuple[str, int]:
        """(attempt, step): a later attempt is newer even if it resumed from an earlier step."""
        return self.shard.root.split("/")[1], self.shard.result["step"]

    def trained(self) -> Trained:
        if finished := isinstance(self.record, Manifest):
            about: Mapping[str, Any] = self.record.result
            sequences = Checkpoint(self.root, self.record).input_paths.get("sequences")
        else:
            about = about_of(self.record)
            sequences = resolve_ref(self.root, about["sequences"])
        return Trained(
            path=self.path,
            step=self.shard.result["step"],
            finished=finished,
            model=TransformerConfig.from_plain(about["model"]),
            sequence_length=about["train"]["sequence_length"],
            compute_dtype=about["train"]["compute_dtype"],
            sequences=sequences,
            root=self.root,
        )


def _of_manifest(root: str, published: Manifest) -> list[_Candidate]:
    """Checkpoints of a published step, with the final one last."""
    result, artifact = published.result, Checkpoint(root, published)
    if not is_run(published) or not (artifact.imported or "sequences" in artifact.input_paths):
        raise InputError(
            f"{root}: expected the output of a train step, found one of {published.label} "
            f"({published.step}); give the directory of the step that trained"
        )
    shards = artifact.shards(CHECKPOINTS)
    shards.sort(key=lambda shard: shard.name == result["checkpoint"])
    return [
        _Candidate(storage.join(artifact.home, shard.root), shard, root, published)
        for shard in shards
    ]


def _of_ledgers(root: str) -> list[_Candidate]:
    """Checkpoints of unpublished builds, oldest first."""
    found = [
        _Candidate(storage.join(root, shard.root), shard, root, ledger)
        for ledger in builds_of(root)
        for shard in ledger.finished(CHECKPOINTS).values()
    ]
    return sorted(found, key=lambda candidate: candidate.age)


def about_of(ledger: Ledger) -> dict[str, Any]:
    """The record that `describe` wrote before training: "model", "train" and "sequences".

    A run that begins from a checkpoint has "continued" too, the fields of `Continued`, unless an
    older version began it.
    """
    shard = ledger.find(ABOUT)
    if shard is None:
        raise InputError(
            f"{ledger.root}: its checkpoints do not say what model they are of, and the step is "
            "not finished; run it to its end first"
        )
    url = storage.join(ledger.root, shard.root, "about.json")
    try:
        return storage.read_json(url)
    except (FileNotFoundError, ValueError) as error:
        raise CorruptOutput(f"{url}: not readable: {error}; run the step again") from error


def _nothing(root: str) -> str:
    """The error message for a `root` without a checkpoint: the reason, and what to give instead."""
    names = storage.list_names(root)
    if LEDGER in names or ATTEMPTS in names:
        return (
            f"{root}: no checkpoint has been committed there yet; wait for the first one (every "
            "checkpoint_every steps), or run the step again"
        )
    steps = [name for name in names if name.startswith("train-")]
    if steps:
        return f"{root}: a store, not a step; give one of {', '.join(steps[:5])} in it"
    found = f"{len(names)} other entries" if names else "nothing"
    return (
        f"{root}: expected the directory of a train step (train-... in a store), or of a "
        f"checkpoint in it, found {found}"
    )


def _published(path: str) -> Manifest:
    found = load(path)
    if found is None:
        raise CorruptOutput(
            f"{path}: the checkpoint was made from this output, which is gone; run again, or give "
            "a tokenizer.json with --tokenizer FILE"
        )
    return found
