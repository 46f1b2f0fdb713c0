"""Counts the work of one train step on a chip from shapes: matmuls, scores, bytes; imports no JAX.

`training.cost.step_time` converts the counts into seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.shape.config import TransformerConfig
from models.shape.footprint import footprint
from models.shape.remat_names import saved_names
from models.shape.splash_tiles import LANES, choose_way
from pipeline.accelerators import GPUS, TPUS, Chip
from training.cost.executed_flops import ATTENTION, repeated

HOST_CHIPS = 8
"""GPUs of a host, unless it is said to have fewer."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A train step on a kind of chip.

    `group`, `sharding`, `sequence` and `tensor` are as in `training.config.parallelism`.

    Attributes:
        rows: sequences per step / chips; a fraction where chips share a sequence.
        slices: groups of chips that only the data-centre network connects.
        per_host: GPUs of a host, which NVLink connects.
        remat: see `models.shape.remat_names`; "half" keeps the matmuls of every second layer.
        state_bytes: bytes of optimizer state per parameter.
        update_flops: FLOPs of the optimizer's matmuls on one chip.
        shared: elements of the matrices that Muon iterates on one chip.
        on_host: whether the optimizer state is in the host's memory.
        reduces_once: whether gradients are summed over the chips once a step, not each microbatch.
    """

    model: TransformerConfig
    rows: float
    sequence_length: int
    chips: int = 1
    group: int = 1
    sharding: str = "replicated"
    sequence: int = 1
    tensor: int = 1
    slices: int = 1
    per_host: int = HOST_CHIPS
    microbatches: int = 1
    remat: str = "none"
    state_bytes: float = 8.0
    update_flops: float = 0.0
    shared: float = 0.0
    on_host: bool = False
    reduces_once: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of a step on one chip."""
        return self.rows * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs and bytes of one step on one chip.

    Attributes:
        matmul_flops: executed FLOPs of matmuls with weights, at sizes padded to the matrix unit;
            `head_flops` is the output head's part.
        matmul_bytes: of operands and results of these matmuls.
        scores: (query, key) pairs times heads that the kernels compute; the backward pass counts as
            `BACKWARD_SCORES` forward passes. `score_flops` are of their matmuls, at padded sizes.
        stream_bytes: that norms, activations and residual additions read and write.
        logits: (position, id) pairs of the loss.
        update_bytes: of parameters, gradients and optimizer state that the update moves.
        host_bytes: moved between chip and host.
        gathered_bytes: of parameters and gradients that collectives move.
        activation_bytes: of collectives over `tensor` and `sequence`.
        network_bytes: that leave the slice, or the host with GPUs.
        doublings: base-2 logarithm of the chips that take part in the step.
    """

    matmul_flops: float
    matmul_bytes: float
    head_flops: float
    scores: float
    score_flops: float
    stream_bytes: float
    logits: float
    update_bytes: float
    update_flops: float
    host_bytes: float
    gathered_bytes: float
    activation_bytes: float
    network_bytes: float
    doublings: float


BACKWARD_SCORES = 2.3
"""Time of attention's backward kernel / its forward kernel: 2.2 to 2.4 measured on tpu7x. The ratio
of their matmuls is 5 to 2."""


def work(job: StepShape, chip: Chip) -> Work:
    model, tokens = job.model, job.tokens
    again = dict.fromkeys(repeated(model, "full" if job.remat == "half" else job.remat), 1.0)
    if job.remat == "half":
        again = dict.fromkeys(again, 0.5)
    flops, operands = _layer_matmuls(job, chip, again)
    # One forward and two backward matmuls. `tensor` chips share tensor x tokens, and each has
    # 1 / tensor of the vocabulary, so the FLOPs per chip do not depend on `tensor`.
    head = 3 * tokens * 2 * _pad(model.padded_vocab_size, chip) * _pad(model.embed, chip)
    table = model.padded_vocab_size / job.tensor
    head_bytes = 3 * 2 * (tokens * job.tensor * (model.embed + table) + table * model.embed)
    scores, score_flops = _attention(job, chip, again.get(ATTENTION, 0.0))
    gathered, network = _state_traffic(job, chip)
    return Work(
        matmul_flops=model.layers * flops + head,
        matmul_bytes=model.layers * operands + head_bytes,
        head_flops=head,
        scores=scores,
        score_flops=score_flops,
        stream_bytes=_streams(job, again),
        logits=tokens * model.padded_vocab_size,
        update_bytes=_update(job),
        update_flops=job.update_flops,
        host_bytes=_host(job),
        gathered_bytes=gathered,
        activation_bytes=_activations(job),
        network_bytes=network,
        doublings=math.log2(job.chips),
    )


def tile_of(chip: Chip) -> int:
    """Side of the matrix unit's tile; on a GPU, of its usual kernels'; on a CPU, of its vectors."""
    if chip.name not in TPUS:
        return 64 if chip.name in GPUS else 8
    return 256 if chip.name in ("v6e", "v7x") else 128


def _pad(size: float, chip: Chip) -> int:
    tile = tile_of(chip)
    return tile * math.ceil(size / tile)


def _layer_matmuls(job: StepShape, chip: Chip, again: dict[str, float]) -> tuple[float, float]:
    """(padded operations, bytes of operands and results) of one layer's matmuls, all passes."""
    tensor, tokens = job.tensor, job.tokens * job.tensor
    flops = operands = 0.0
    for each in footprint(job.model).matrices:
        # Without repetition 3 executions: one forward matmul, and two backward, for the gradients
        # of the input and of the weight.
        passes = 3 + again.get(each.result, 0.0)
        rows, columns = float(each.rows), float(each.columns)
        rows, columns = (rows, columns / tensor) if each.into_block else (rows / tensor, columns)
        flops += passes * 2 * tokens * _pad(rows, chip) * _pad(columns, chip)
        weight = rows * columns * job.microbatches
        operands += passes * 2 * (tokens * (rows + columns) + weight)
    return flops, operands


def _attention(job: StepShape, chip: Chip, again: float) -> tuple[float, float]:
    """(scores, FLOPs at padded head sizes) of all layers, causal and inside windows."""
    model = job.model
    attended = footprint(model).pairs(job.sequence_length) / job.sequence_length
    scores = job.tokens * model.heads * attended * (1 + BACKWARD_SCORES + again)
    lanes = min(tile_of(chip), 128)
    # Two matmuls of 2 x head_size FLOPs per score: queries with keys, probabilities with values.
    return scores, scores * 4 * lanes * math.ceil(model.head_size / lanes)


def _streams(job: StepShape, again: dict[str, float]) -> float:
    """Bytes of elementwise work: three times a forward pass, once more where it is recomputed."""
    model = job.model
    middle = (3 if model.mlp_kind == "swiglu" else 2) * model.mlp
    heads = 4 * (model.heads + 2 * model.kv_heads) * model.head_size
    # The first block's input, and rows that half of the layers add to their values.
    heads += 4 * model.kv_heads * model.head_size * any(model.value_layers) / 2
    streams = 12 if model.input_scale is None else 14
    width = streams * model.embed + (2 * middle + heads) / job.tensor
    passes = 3 + (max(again.values()) if again else 0.0)
    return passes * job.tokens * job.tensor * width * model.layers


def _update(job: StepShape) -> float:
    """Bytes of the update: gradients are read; parameters and optimizer state read and written.

    Each microbatch after the first reads and writes the accumulated float32 gradients.
    """
    own = job.model.parameter_count / job.tensor / job.group
    summed = own * (job.group if job.reduces_once else 1)
    return own * (4 + 2 * (4 + job.state_bytes)) + summed * 8 * (job.microbatches - 1)


def _host(job: StepShape) -> float:
    """Bytes of residuals and optimizer state that move to the host and back."""
    model, moved = job.model, 0.0
    if job.remat not in ("none", "dots", "half"):
        size = footprint(model).widths
        # Twice (there and back), 2 bytes each.
        moved = 2 * 2 * job.tokens * model.layers * sum(size[n] for n in saved_names(job.remat)[1])
    own = model.parameter_count / job.tensor / job.group
    return moved + (2 * own * job.state_bytes if job.on_host else 0.0)


def _state_traffic(job: StepShape, chip: Chip) -> tuple[float, float]:
    """(bytes inside the slice or host, bytes that leave it) of parameters and gradients.

    Collectives are rings over n chips: an all-gather or reduce-scatter moves (n - 1) / n of the
    array per chip, an all-reduce twice that. Gradients count as float32, which sums of a microbatch
    rarely are: their bytes are a bound. libtpu reports 111, 222 and 415 MB for 1, 2 and 4
    microbatches on v6e-16. With several slices, each chip sends its share of the gradients to the
    others as often, with every sharding: a quarter on two v6e-4. Muon's all-to-alls, to whole
    matrices and back, move (n - 1) / n of a chip's own.
    """
    size = 2 * job.model.parameter_count / job.tensor  # in the compute dtype
    ring = (job.group - 1) / job.group
    gathers = {"replicated": 0, "zero1": 1, "fsdp": 2 * job.microbatches}[job.sharding]
    sums = 1 if job.reduces_once else job.microbatches
    inside = size * ring * (gathers + 2 * sums)  # float32 gradients have 2 x `size` bytes
    inside += 2 * 2 * job.shared * (ring + (job.tensor - 1) / job.tensor)
    copies = job.chips / (job.group * job.sequence * job.tensor)
    if copies > 1:  # all-reduce (hence the other 2) of one chip's shard of the gradients
        inside += sums * 2 * 2 * size / job.group * (copies - 1) / copies
    if chip.name in TPUS:
        share = job.slices * job.tensor / job.chips
        return inside, (sums * 4 * size * share if job.slices > 1 else 0.0)
    several = job.chips > job.per_host
    return inside, (inside / min(job.group, job.per_host) if several else 0.0)


def _activations(job: StepShape) -> float:
    model, residuals = job.model, job.tokens * job.tensor * job.model.embed
    again = 1 if job.remat not in ("none", "matmuls", "dots") else 0
    # All-reduces of the residual stream (2 bytes, moved twice): in a layer two forward, two
    # backward and perhaps one recomputed; beside the layers the lookup's and the head's gradient's.
    sums = model.layers * (2 + 2 + again) + 2
    moved = 2 * 2 * sums * residuals * (job.tensor - 1) / job.tensor
    if job.sequence > 1:
        moved += math.fsum(_exchanged(job, window) for window in model.windows)
    return moved


def _exchanged(job: StepShape, window: int | None) -> float:
    """Bytes of one layer's collectives between the chips that share a sequence.

    They run forward and backward, and once more with recomputation: no policy keeps their results.
    """
    model, shards = job.model, job.sequence
    chunk_fits = job.sequence_length % (2 * shards * LANES) == 0
    way = choose_way(model.kv_heads // job.tensor, chunk_fits, window, shards)
    size = 2 * job.tokens * model.head_size  # of one head's queries on one chip
    queries, keys_values = 2 * size * model.heads, 2 * size * model.kv_heads  # queries and output
    if way == "heads":
        moved = (queries + keys_values) * (shards - 1) / shards
    else:
        moved = keys_values * (shards - 1) + (queries if way == "zigzag" else 0.0)
    return moved * (2 if job.remat == "none" else 3)
