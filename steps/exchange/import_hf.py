"""Import a Hugging Face model as a checkpoint, to train, evaluate, generate or export it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from models.shape.validation import at_least, check_value
from pipeline import External, InputError, Result, StepContext, step
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node
from pipeline.identity.fingerprint import plain_identity
from pipeline.identity.listing import Listing
from pipeline.store import storage
from steps.artifacts import Checkpoint
from steps.gang import HUB
from training.config import TrainConfig
from training.config.train import ComputeDtype

_MOST_TOKENS = 2048  # most tokens of a sequence by default
_CHECKPOINT = "checkpoint/00000000"


def _list(source: str, seconds: float) -> Listing:
    from steps.exchange.hf.read_hf import list_model

    return list_model(source, seconds)


def _absolute(source: Any) -> Any:
    if not isinstance(source, str) or not source or not storage.is_local(source):
        return source
    return storage.local_path(source)


def _check(arguments: Mapping[str, Any]) -> None:
    source = arguments["source"]
    if not (storage.is_local(source) or source.startswith("hf://")):
        raise InputError(
            f"import_hf: expected a folder or hf://owner/name@commit, found {source!r}; copy other "
            "places to a folder first"
        )
    if (length := arguments["sequence_length"]) is not None:
        at_least("import_hf", sequence_length=(length, 2))
    check_value("import_hf.compute_dtype", arguments["compute_dtype"], ComputeDtype)


def _facts(node: Node, results: Results) -> Facts:
    """The size of a model on a disk. Raises `InputError` for a config.json that is refused."""
    del results
    source, ignored = node.config["source"], node.config["ignore_keys"]
    if not storage.is_local(source):
        return Facts()
    from models.hf.architectures import from_json
    from steps.exchange.hf.hf_files import read_json

    architecture, config, _ = from_json(read_json(source, "config.json"), ignored)
    return Facts((f"model       {architecture.name}, {config.parameter_count:,} parameters",))


@step(output=Checkpoint, version=2, check=_check, facts=_facts, environment=HUB)
def import_hf(
    run: StepContext,
    source: Annotated[str, External(_list, _absolute)],
    *,
    sequence_length: int | None = None,
    compute_dtype: ComputeDtype = "bfloat16",
    ignore_keys: tuple[str, ...] = (),
    eos: str | None = None,
) -> Result:
    """A checkpoint of the model in a folder with config.json, safetensors and tokenizer.json.

    An error names any key of config.json that asks for an unsupported computation. Ids that the
    model has and its tokenizer lacks are padding: they get no probability. BOS and EOS are those of
    tokenizer_config.json, or of the ids in generation_config.json or config.json.

    Args:
        source: path of a folder, or `hf://owner/name@commit` on the hub; without `@commit` the
            branch `main`.
        sequence_length: tokens of a sequence in evaluations; by default the model's longest, up to
            2,048.
        compute_dtype: dtype of matmuls in evaluations.
        ignore_keys: unknown keys of config.json to ignore; make sure that they change nothing.
        eos: name of the token that ends a document, where the folder names none or another.
    """
    from steps.exchange.hf.read_hf import open_hf, opened, write_checkpoint
    from training.checkpoint.files import content_of, read_index

    with opened(source) as folder:
        model, tokenizer_json, tokenizer = open_hf(folder, ignore_keys, eos)
        about: dict[str, Any] = {"step": 0, "progress": "imported"}
        with run.shard(_CHECKPOINT, about) as directory:
            write_checkpoint(model, directory)
            about["content"] = content_of(read_index(directory))
    with run.shard("tokenizer") as directory:
        storage.write_atomic(storage.join(directory, "tokenizer.json"), tokenizer_json)
    config = model.config
    if config.padded_vocab_size > config.vocab_size:
        run.warn(
            f"the model has {config.padded_vocab_size:,} ids and its tokenizer "
            f"{config.vocab_size:,}: the others get no probability"
        )
    length = sequence_length or min(model.positions, _MOST_TOKENS)
    train = TrainConfig(batch_size=8, sequence_length=length, compute_dtype=compute_dtype)
    name, parameters = model.architecture.name, config.parameter_count
    return {
        "checkpoint": _CHECKPOINT,
        "model": plain_identity(config),
        "train": plain_identity(train),
        "vocab_size": tokenizer.vocab_size,
        "digest": tokenizer.digest,
        "imported": {"architecture": name, "parameters": parameters, "positions": model.positions},
        "measured": {"source": source},
        "headline": [f"{name}, {parameters:,} parameters"],
    }
