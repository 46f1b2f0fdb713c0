"""The training run that a node declares, as far as it follows from the graph."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from models.shape.config import TransformerConfig
from pipeline import Hardware, InputError
from pipeline.graph.facts import Results
from pipeline.graph.step import Node
from pipeline.store import storage
from steps.artifacts import TEST, TRAIN, Documents, Sequences, TokenCache
from steps.declared import data_setting, declared_model, nearest_setting, splits
from steps.scaling_law.points import spent
from steps.training.budget import budgeted, steps_of
from steps.training.plan.continued import continued_optimizer, done_before, steps_saved
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import batch_phases, largest_of, rows_read
from training.config.job import check_enough


@dataclass(frozen=True)
class DeclaredRun:
    """A step that trains.

    Attributes:
        train: of the largest batch phase that is left, with the sequences' length.
        steps: those that are done included; None if they depend on outputs that do not exist yet.
        splits: number of held-out splits to evaluate on.
        exact: whether `steps` is exact, or estimated from the tokens of the cache or the budget of
            `sample`.
        done: steps that are done: by the run it continues, or by an interrupted attempt.
        whole: the configuration with all batch phases.
        epochs: how often the steps read each source; empty where that is not known yet.
    """

    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    hardware: Hardware
    steps: int | None
    splits: int
    exact: bool
    done: int
    whole: TrainConfig
    epochs: tuple[float, ...]

    @property
    def tokens(self) -> int | None:
        """Training tokens of the steps that are left."""
        return spent(self.model, self.whole, self.done)[0] if self.steps else self.steps

    @property
    def steps_compiled(self) -> int:
        """The steps, or more than any warmup, decay or average has where they are not known.

        They are constants of the compiled step, which change nothing of its memory.
        """
        return self.steps or 10**8

    @property
    def flops(self) -> float | None:
        """FLOPs of the steps that are left, with causal attention."""
        return spent(self.model, self.whole, self.done)[1] if self.steps else self.steps


def declared_run(node: Node, results: Results) -> DeclaredRun | None:
    """The run that `node` declares; None if its model or length does not follow from the graph."""
    model = model_of(node, results)
    sequences, train = node.inputs.get("sequences"), node.config["train"]
    if sequences is None or model is None:
        return None
    result = results.get(sequences.key, {})
    length = train.sequence_length or result.get("sequence_length")
    length = length or nearest_setting(sequences, "sequence_length")
    if not length:
        return None
    train = dataclasses.replace(train, sequence_length=length)
    steps, exact = _steps(node, sequences, train, results)
    known = dataclasses.replace(train, steps=steps or train.steps)
    done = max(done_before(node, results) or 0, steps_saved(node, results))
    if "sequences" in result and nearest_setting(sequences, "weights") is None:
        check_enough(known, result["sequences"])
    optimizer = node.config["optimizer"]
    if node.step.name == "extend":
        optimizer = continued_optimizer(node.config, node.inputs["checkpoint"], results)
    # By default all but "test"; one where none is declared.
    evaluated = [name for name in splits(sequences) or ("",) if name != TEST]
    left = [p for p in batch_phases(known) if p.end > done] or [batch_phases(known)[-1]]
    return DeclaredRun(
        model=model,
        optimizer=optimizer,
        train=largest_of(left).config(known),
        hardware=node.runtime["hardware"],
        steps=steps,
        splits=len(node.config.get("splits") or evaluated),
        exact=exact,
        done=done,
        whole=known,
        epochs=_epochs(sequences, known, results) if steps else (),
    )


def _epochs(sequences: Node, train: TrainConfig, results: Results) -> tuple[float, ...]:
    """How often the run reads each source; empty where the size of one is not known."""
    while "order" in sequences.inputs:  # without documents, an order of as many rows
        sequences = sequences.inputs["order"]
    length, read = train.sequence_length, rows_read(train, train.steps)
    parts = [n for n in sequences.inputs.values() if issubclass(n.output, Sequences)]
    counts = [_rows(part, length, results) for part in parts or [sequences]]
    if min(counts) < 1:
        return ()
    if not parts:
        return (read / counts[0],)
    from data.batches.mixture import Mixture, MixturePhase

    starts = [(0, sequences.config["weights"])]
    starts += [(-(-p.start_tokens // length), p.weights) for p in sequences.config["later"]]
    phases = [MixturePhase(start=start, weights=weights) for start, weights in starts]
    drawn = Mixture(phases, sequences.config["seed"]).drawn(read).tolist()
    return tuple(rows / count for rows, count in zip(drawn, counts, strict=True))


def _rows(sequences: Node, length: int, results: Results) -> int:
    """Rows of one shuffled cache, or those of its declared tokens; 0 when not known."""
    made = results.get(sequences.key, {}).get("sequences")
    return max(_tokens(sequences, results) or 0, 0) // length if made is None else made


def model_of(node: Node, results: Results) -> TransformerConfig | None:
    """The shape of the model that `node` trains; None if it does not follow from the graph."""
    model, child = node.config.get("model"), node.inputs.get("checkpoint")
    if model is not None or child is None:
        return model
    if "model" in (made := results.get(child.key, {})):
        return TransformerConfig.from_plain(made["model"])
    if (model := declared_model(child)) is not None:
        return model
    if child.step.name == "import_hf" and storage.is_local(child.config["source"]):
        from models.hf.architectures import from_json

        with contextlib.suppress(OSError, ValueError, InputError):  # the import's own facts tell
            url = storage.join(child.config["source"], "config.json")
            return from_json(storage.read_json(url), child.config["ignore_keys"])[1]
    return None


def _steps(
    node: Node, sequences: Node, train: TrainConfig, results: Results
) -> tuple[int | None, bool]:
    if train.steps:
        return train.steps, True
    epochs, tokens = node.config.get("epochs"), node.config.get("tokens")
    made = results.get(sequences.key, {})
    if tokens is not None or "sequences" in made:
        return budgeted(train, made.get("sequences"), epochs, tokens).steps, True
    available = _tokens(sequences, results)
    if available is None or available < 0:
        return None, False
    return steps_of(int((epochs or 1) * available) // train.sequence_length, train), False


def _tokens(sequences: Node, results: Results) -> int | None:
    """Training tokens of the cache that the sequences are cut from, or the budget of `sample`."""
    caches = [n for n in sequences.inputs.values() if issubclass(n.output, TokenCache)]
    splits = results.get(caches[0].key, {}).get("splits", {}) if len(caches) == 1 else {}
    counted = splits.get(TRAIN, {}).get("tokens")
    return counted or data_setting(sequences, "tokens", Documents)
