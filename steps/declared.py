"""Checks of a declared graph, before anything runs.

A step's `check` receives the nodes of its inputs. The configurations of these nodes and of their
ancestors have the settings that the checks compare; a setting that no ancestor has is None.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from models.shape.config import TransformerConfig
from pipeline import Artifact, InputError
from steps.artifacts import TEST, TRAIN, Checkpoint, Documents, Sequences, TokenCache
from steps.platforms import devices_of
from training.config import TrainConfig
from training.cost.resolved_run import check_lengths, check_run


def nearest_setting(
    node: Any, name: str, kind: type[Artifact] | tuple[type[Artifact], ...] = Artifact
) -> Any:
    """The setting `name` of the nearest step that produces a `kind`: `node` or an ancestor.

    None if no such step has that setting; a step where it is None takes it from another one.
    """
    found = (n for n in nearest(node, kind) if n.config.get(name) is not None)
    return next((n.config[name] for n in found), None)


def declared_model(checkpoint: Any) -> TransformerConfig | None:
    """The shape of a checkpoint; None where its steps declare none, or a selection is of several.

    Steps that declare none are imports, and those that continue one.
    """
    waiting, met, found = [checkpoint], {checkpoint.key}, list[Any]()
    while waiting:
        node = waiting.pop()
        above = [child for child in node.inputs.values() if issubclass(child.output, Checkpoint)]
        if (model := node.config.get("model")) is not None or not above:
            found.append(model)
            continue
        new = {child.key: child for child in above if child.key not in met}
        waiting.extend(new.values())
        met |= new.keys()
    first = found[0]
    same = isinstance(first, TransformerConfig) and all(each == first for each in found)
    return first if same else None


def nearest(node: Any, kind: type[Artifact] | tuple[type[Artifact], ...]) -> Iterator[Any]:
    """`node` and its ancestors that produce a `kind`, from the nearest on."""
    waiting, met = deque([node]), {node.key}
    while waiting:
        first = waiting.popleft()
        if issubclass(first.output, kind):
            yield first
        above = {child.key: child for child in first.inputs.values() if child.key not in met}
        waiting.extend(above.values())
        met |= above.keys()


def data_steps(node: Any) -> Iterator[Any]:
    """`node` and the steps that its data passed through, from the nearest on.

    Of a mixture those of its first input, whose cache it has the splits and the vocabulary of (see
    `Sequences.cache`), of a selection those of its first candidate. Steps of which the data is not
    made, such as the sample that a tokenizer was trained on, are left out.
    """
    while node is not None:
        yield node
        inputs = list(node.inputs.values())
        data = [n for n in inputs if issubclass(n.output, (Sequences, TokenCache, Documents))]
        node = next(iter(data or [n for n in inputs if n.output is node.output]), None)


def data_setting(node: Any, name: str, kind: type[Artifact] | tuple[type[Artifact], ...]) -> Any:
    """As `nearest_setting`, of the steps that the data of `node` passed through."""
    found = (n.config.get(name) for n in data_steps(node) if issubclass(n.output, kind))
    return next((value for value in found if value is not None), None)


def tokenizer_of(node: Any) -> Any:
    """The step of the tokenizer that made the tokens of `node`; None of rows of integers."""
    found = (
        n.inputs.get("tokenizer") for n in data_steps(node) if issubclass(n.output, TokenCache)
    )
    return next((tokenizer for tokenizer in found if tokenizer is not None), None)


def vocabulary(node: Any) -> int | None:
    """Declared ids of the tokens of `node`: of their tokenizer, or of the rows of integers.

    None if neither declares it, as a tokenizer that is read from a file.
    """
    tokenizer = tokenizer_of(node)
    if tokenizer is None:
        return data_setting(node, "vocab_size", TokenCache)
    return tokenizer.config.get("vocab_size")


def splits(node: Any) -> tuple[str, ...] | None:
    """Names of the held-out splits with a budget; None if no step of its data declares any."""
    budgets = data_setting(node, "splits", (Documents, TokenCache))
    return None if budgets is None else tuple(name for name, tokens in budgets if tokens)


def of_conversations(sequences: Any) -> bool:
    """Whether sequences are of `steps.conversations`."""
    found = next(nearest(sequences, TokenCache), None)
    return found is not None and found.step.name == "conversations"


def check_splits(step: str, node: Any, wanted: tuple[str, ...]) -> None:
    """Refuse splits that no step produces, and training or evaluation without a held-out split."""
    known = splits(node)
    if known is None:
        return
    by_default = step == "train" and not wanted  # `train` evaluates on all but "test"
    if not [name for name in known if not (by_default and name == TEST)]:
        raise InputError(
            f"{step}: no validation tokens, which a loss needs; "
            'sample with splits=(("validation", tokens),)'
        )
    for name in wanted:
        if name == TRAIN or name not in known:
            raise InputError(
                f"{step}: no held-out split {name!r}; sample makes {', '.join(known)}; name one "
                "of these, or add it to the splits of sample"
            )


def check_length(train: TrainConfig, length: int | None) -> None:
    """Refuse another length than that of the sequences, where it is known."""
    if length is not None and train.sequence_length not in (0, length):
        raise InputError(
            f"TrainConfig.sequence_length is {train.sequence_length}, the shuffled sequences are "
            f"{length} tokens long; leave it out to use their length"
        )


def check_training(
    arguments: Mapping[str, Any], model: TransformerConfig | None, done: int = 0
) -> None:
    """Refuse a training that cannot run: vocabularies or lengths that differ, and what
    `training.cost.resolved_run` refuses on the hardware."""
    sequences, train = arguments["sequences"], arguments["train"]
    length = nearest_setting(sequences, "sequence_length")
    entries = vocabulary(sequences)
    if model is not None and entries not in (None, model.vocab_size):
        raise InputError(
            f"TransformerConfig.vocab_size is {model.vocab_size}, the tokenizer has {entries} "
            f"ids; set the model's vocab_size to {entries} (vocab_multiple pads its tables)"
        )
    check_length(train, length)
    if of_conversations(sequences) and not train.separate_documents:
        raise InputError(
            "TrainConfig.separate_documents is False, and conversations share rows: a reply would "
            "attend to another conversation; set it to True"
        )
    train = dataclasses.replace(train, sequence_length=length or train.sequence_length)
    optimizer, hardware = arguments["optimizer"], arguments["hardware"]
    check_lengths(model, optimizer, train)
    # Which devices this machine has matters to a run on it, not where that is declared.
    if model is not None and train.sequence_length and hardware.devices:
        check_run(model, optimizer, train, devices_of(hardware), done=done)
    check_splits("train", sequences, arguments["splits"])
