"""What a step takes over from a training before it: a checkpoint, its state, the steps done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import InputError
from pipeline.graph.facts import Facts, Published, Results
from pipeline.graph.step import Node
from pipeline.identity import digests
from pipeline.store import storage
from pipeline.store.builds import find_build
from pipeline.store.ledger import Ledger
from steps.artifacts import Checkpoint, Sequences
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import kept_for_good, rows_read

CHECKPOINTS = "checkpoint/"


def store_of(results: Results) -> Published:
    """The store that results are of; an empty one, of no place, for others."""
    return results if isinstance(results, Published) else Published({}, "")


def trainings(node: Node) -> list[Node]:
    """The steps that may have trained the checkpoint `node`; none for an imported model."""
    if "train" in node.config:
        return [node]
    inputs = [child for child in node.inputs.values() if issubclass(child.output, Checkpoint)]
    return [found for child in inputs for found in trainings(child)]


def checkpoint_at(node: Node, results: Results) -> Facts:
    """No facts. Raises `InputError` for an `at` of which its input has, or will have, none."""
    at, places = node.config["at"], store_of(results).places
    for child in node.inputs.values():
        if at is None or not issubclass(child.output, Checkpoint):
            continue
        if child.key in places:
            child.output(*places[child.key]).at(at)
        else:
            _check_kept(child, at)
    return Facts()


def _check_kept(node: Node, at: int) -> None:
    """Refuse a step of which the declared training `node` will keep no checkpoint."""
    kept = []
    for each in trainings(node):
        train, begins = each.config["train"], done_before(each, {})
        if not train.steps or begins is None:
            return  # its last step, which is kept, is known when it is built
        kept += [train.steps] if begins < train.steps else []
        if begins < at <= train.steps and kept_for_good(at, train):
            return
    if kept:
        raise InputError(
            f"{node.label}: no checkpoint of step {at} will be kept; of its {max(kept):,} steps "
            "it keeps the last, those of TrainConfig.milestones and the multiples of "
            f"TrainConfig.keep_every; add {at} to its milestones"
        )


def done_before(node: Node, results: Results) -> int | None:
    """Steps that are done before a training's own first one; None if that is not known yet."""
    if node.step.name != "extend":
        return 0
    return steps_of_checkpoint(node.inputs["checkpoint"], node.config["at"], results)


def steps_of_checkpoint(node: Node, at: int | None, results: Results) -> int | None:
    """Steps done at a checkpoint, 0 for an imported model; None if that is not known yet."""
    if at is not None and trainings(node):
        return at
    if (made := results.get(node.key)) is not None:
        return int(str(made["checkpoint"]).removeprefix(CHECKPOINTS))
    ends = {each.config["train"].steps for each in trainings(node)}
    return min(ends, default=0) or (None if ends else 0) if len(ends) < 2 else None


def continued_optimizer(
    config: Mapping[str, Any], checkpoint: Node, results: Results
) -> OptimizerConfig:
    """The optimizer of a step of these settings that extends a run, as far as that is known."""
    optimizer, steps = config["optimizer"], config["train"].steps
    firsts = _first_trainings(checkpoint)
    ends = {
        each.config["train"].steps or results.get(each.key, {}).get("train", {}).get("steps")
        for each in firsts
    }
    # Of a selected run it is known which one it is.
    begun = results.get(checkpoint.key, {}).get("first_steps")
    begun = begun or (ends.pop() if len(ends) == 1 else None)
    done = steps_of_checkpoint(checkpoint, config["at"], results)
    if not firsts or not begun or not done or done >= steps:
        return optimizer
    return optimizer.continued(done, steps, begun)


def _first_trainings(node: Node) -> list[Node]:
    """The trainings that began at step 0, of which the checkpoint `node` may be an extension."""
    waiting, met, found = trainings(node), set[str](), list[Node]()
    while waiting:
        each = waiting.pop()
        if each.key in met:
            continue
        met.add(each.key)
        extended = each.step.name == "extend"
        before = trainings(each.inputs["checkpoint"]) if extended else []
        waiting.extend(before)
        found += [] if before else [each]
    return found


def steps_saved(node: Node, results: Results) -> int:
    """The step of the newest checkpoint that a run of `node` would resume from; 0 for none."""
    store = store_of(results)
    if not store.prefix or not {child.key for child in node.inputs.values()} <= store.places.keys():
        return 0
    held = {name: store.places[child.key][1].content for name, child in node.inputs.items()}
    root = storage.join(store.prefix, node.directory)
    action = digests.action(node.identity, held)
    ledger = Ledger(root, find_build(root, action, "", node.identity.config, held).id)
    saved = ledger.finished(CHECKPOINTS).values()
    return max((shard.result["step"] for shard in saved), default=0)


def check_data(node: Node, results: Results) -> None:
    """Refuse to extend a published run with other sequences than it has read, once both exist."""
    places = store_of(results).places
    before, sequences = node.inputs["checkpoint"].key, node.inputs["sequences"].key
    if node.step.name != "extend" or before not in places or sequences not in places:
        return
    (path, made), (there, shuffled) = places[before], places[sequences]
    was = made.inputs.get("sequences")
    if was is not None and not continues(was["digest"], Sequences(there, shuffled)):
        raise InputError(
            f"extend: {path} was trained on {was['directory']}, these sequences are {there}; to "
            "train on other data use warm_start"
        )


def continues(content: str, sequences: Sequences) -> bool:
    """Whether sequences are those of this content, or these without some documents."""
    above: Sequences | None = sequences
    while above is not None and above.manifest.content != content:
        above = above.order
    return above is not None


def check_end(sequences: Sequences, train: TrainConfig) -> None:
    """Refuse more steps than the ones that documents were left out of."""
    end, rows = sequences.result.get("end"), rows_read(train, train.steps)
    if end is not None and rows > end:
        raise InputError(
            f"{train.steps:,} steps read {rows:,} sequences, and {sequences.path} leaves its "
            f"documents out of the first {end:,}; give `without` end={rows}"
        )


def check_state(arguments: Mapping[str, Any], take: str) -> None:
    """Refuse settings with another training state than that of the checkpoint to continue from.

    `take` is "everything" (the whole state and the data order), "moments", or "model" (neither).
    """
    checkpoint, optimizer, train = (arguments[n] for n in ("checkpoint", "optimizer", "train"))
    before = trainings(checkpoint)
    if take == "moments" and checkpoint.step.name == "import_hf":
        raise InputError(
            f'warm_start: {checkpoint.label} is imported and has no moments; take="model"'
        )
    if take == "model" or len(before) != 1:
        return
    config = before[0].config
    was = _state_settings(config["optimizer"], config["train"], take)
    for name, (value, arrays) in _state_settings(optimizer, train, take).items():
        old, old_arrays = was[name]
        if arrays != old_arrays:
            raise InputError(
                f"{name}: expected {old!r}, with which {checkpoint.label} was trained, found "
                f"{value!r}: its training state has other arrays; keep the setting, or begin a new "
                'run with warm_start(..., take="model")'
            )
    done = steps_of_checkpoint(checkpoint, arguments["at"], {}) if take == "everything" else None
    if done is None:
        return
    if done >= train.steps:
        raise InputError(
            f"{checkpoint.label} has done {done} steps and TrainConfig.steps is {train.steps}; to "
            "continue from it set more steps, or choose an earlier checkpoint"
        )
    read, old_read = rows_read(train, done), rows_read(config["train"], done)
    if read != old_read:
        raise InputError(
            f"TrainConfig.batch_size or batch_schedule: {checkpoint.label} has read {old_read} "
            f"sequences in its first {done} steps, these settings would have read {read}; keep "
            "those of its steps"
        )


def _state_settings(
    optimizer: OptimizerConfig, train: TrainConfig, take: str
) -> dict[str, tuple[Any, Any]]:
    """Settings that decide which arrays a training state has: value, and what of it does."""
    found = {f"OptimizerConfig.{n}": (getattr(optimizer, n),) * 2 for n in ("kind", "moment_dtype")}
    for role, label in optimizer.labels.items():
        arrays = label, optimizer.group(role).kind
        found[f"OptimizerConfig.{role}"] = getattr(optimizer, role), arrays
    if optimizer.group("matrices").kind == "muon":
        start, end = optimizer.muon_momentum_start, optimizer.muon_momentum_end
        varies, beta = start is not None or end is not None, optimizer.muon_row_beta
        found["OptimizerConfig.muon_momentum_start and _end"] = (start, end), varies
        found["OptimizerConfig.muon_row_beta"] = beta, beta is None
    if take == "everything":
        for name in ("ema", "average_last", "spike_guard"):
            found[f"TrainConfig.{name}"] = getattr(train, name), bool(getattr(train, name))
    return found
