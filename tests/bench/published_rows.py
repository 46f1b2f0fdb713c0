"""Published speeds as jobs of `training.cost.step_work`, and why the others are left out.

`tests/bench/published/rows.csv` has a row for each measurement with its source, file or thread.
What a row does not state is filled in by the rules here, which are those of the system it is from.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from models.shape.config import TransformerConfig
from models.shape.footprint import training_flops_per_token
from pipeline.accelerators import GPUS, TPUS, Chip, Tpu
from training.config.optimizer import OptimizerConfig
from training.cost.executed_flops import orthogonalization_flops
from training.cost.step_work import StepShape

ROWS = Path(__file__).parent / "published" / "rows.csv"
QKV = "queries,keys,values"
# By what the column `remat` starts with.
REMAT = {
    "custom: layer input, qkv, out_proj": f"save:mlp_input;offload:block_input,{QKV}",
    "custom: layer input, context, qkv": f"save:attention_residuals,{QKV}",
    "custom: layer input, qkv": f"offload:block_input,{QKV}",
    "custom: layer input offloaded, keys": "save:keys,values;offload:block_input",
    "layer input offloaded": "offload:block_input",
    "qkv_proj_offloaded": f"offload:{QKV}",
    "qkv and": f"save:mlp_input;offload:{QKV}",
    "activati": f"save:mlp_input;offload:{QKV}",
    "dots_sav": "dots",
    "selectiv": "half",
    "minimal": "matmuls",
    "none": "matmuls",
    "full": "full",
    "": "half",
}
DEFAULTS = ("maxtest/getting_started", "tomat", "EasyDeL", "LEADERBOARD.md d24 port", "H100 8x2")
"""Sources that ran with the defaults of their system, or say that they are not tuned; the last took
longer on 16 H100 than on 32 v5e, which have two fifths of their FLOP/s."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        source: repository or person, by which rows are left out together.
        measured: tokens a second and device.
        tuned: whether somebody looked for the fastest settings.
        origin: file or thread.
    """

    source: str
    label: str
    chip: Chip
    job: StepShape
    measured: float
    tuned: bool
    origin: str


def read() -> tuple[list[Row], list[tuple[str, str]]]:
    """(rows that can be predicted, (label, reason) of the others), in the file's order."""
    rows, left_out = [], []
    with open(ROWS, newline="") as file:
        for line in csv.DictReader(file):
            label = f"{line['model']} on {line['chips']} {line['hardware']}"
            made = _row(line, label)
            rows.append(made) if isinstance(made, Row) else left_out.append((label, made))
    return rows, left_out


def _row(line: dict[str, str], label: str) -> Row | str:
    name = line["hardware"].lower().removesuffix("-80gb").replace("tpu", "v")
    chip = {**TPUS, **GPUS}.get(name)
    if chip is None:
        return f"{line['hardware']} is not in pipeline/accelerators.py"
    if re.search(r"fp8|float8", line["precision"]):
        return "matmuls in 8 bits"
    if re.search(r"MoE|Mixtral|Llama4|DeepSeek|sinks", line["model"]):
        return "another architecture"
    if not all(line[n] for n in ("layers", "embed", "head_dim", "mlp", "seq", "per_device_batch")):
        return "shape or batch not published"
    model, length = _model(line), int(line["seq"])
    speed = _tokens_per_second(line, chip, model, length)
    if speed is None:
        return "no speed published"
    devices = chip.devices if isinstance(chip, Tpu) else 1
    return Row(
        source=_source(line["source"]),
        label=label,
        chip=chip,
        job=_job(line, model, length, devices),
        measured=speed / devices,
        tuned=not any(name in line["source"] for name in DEFAULTS),
        origin=line["source"],
    )


def _source(origin: str) -> str:
    name = origin.partition("@")[0].partition(":")[0]
    return "tomat" if name.startswith("tomat") else name.rpartition("/")[2].strip()


def _model(line: dict[str, str]) -> TransformerConfig:
    plain = line["model"].startswith(("MPT", "GPT3"))
    # The parameters of the two measured on v4 agree with heads of 256 and an MLP of two matrices.
    doubtful = line["model"] in ("22B", "52B")
    kind = "gelu" if plain or doubtful else "swiglu"
    if line["model"].startswith("nanochat"):
        kind = "relu2"
    return TransformerConfig(
        vocab_size=int(line["vocab"]),
        layers=int(line["layers"]),
        embed=int(line["embed"]),
        heads=int(line["heads"]),
        kv_heads=int(line["kv_heads"]),
        head_size=256 if doubtful else int(line["head_dim"]),
        mlp=int(line["mlp"]),
        mlp_kind=kind,
        tied=plain,
    )


def _tokens_per_second(
    line: dict[str, str], chip: Chip, model: TransformerConfig, length: int
) -> float | None:
    if line["tok_s_chip"]:
        return float(line["tok_s_chip"])
    flops = training_flops_per_token(model, length, causal=False)
    if line["tflops_chip"]:
        return float(line["tflops_chip"]) * 1e12 / flops
    if line["mfu_reported"]:
        return float(line["mfu_reported"]) * chip.peak / flops
    return None


def _job(line: dict[str, str], model: TransformerConfig, length: int, devices: int) -> StepShape:
    chips, how = int(line["chips"]) * devices, line["sharding"]
    tensor = int(found[1]) if (found := re.search(r"tensor (\d+)", how)) else 1
    sequence = int(found[1]) if (found := re.search(r"context (\d+)", how)) else 1
    slices = 1 if line["hardware"] in ("v5p", "tpu7x") else max(1, chips // 256)
    sharding = "fsdp" if re.search(r"fsdp|FULL_SHARD", how) else "replicated"
    if re.search(r"SHARD_GRAD|optimizer split", how):
        sharding = "zero1"
    if chips == 1:
        sharding = "replicated"
    named = re.fullmatch(r"data .*fsdp (\d+)", how)
    whole = int(named[1]) if named else chips // slices // tensor // sequence
    group = whole if sharding != "replicated" else 1
    if line["hardware"][:1] != "v":
        slices = 1
    count = re.search(r"microbatch (\d+) x accumulation (\d+)|micro\w* (\d+)", line["note"])
    rows = float(line["per_device_batch"])
    microbatches = int(count[2]) if count and count[2] else 1
    if "two microbatches" in line["note"]:
        rows, microbatches = 2 * rows, 2
    if "tpuchat" in line["source"] and count and count[3]:
        microbatches = int(rows) // int(count[3])
    remat = next(value for name, value in REMAT.items() if line["remat"].startswith(name))
    if re.search("per data-parallel rank", line["note"]):
        rows /= tensor
    return StepShape(
        model=model,
        rows=rows,
        sequence_length=length,
        chips=chips,
        group=group,
        sharding=sharding,
        sequence=sequence,
        tensor=tensor,
        slices=slices,
        microbatches=microbatches,
        remat=remat,
        update_flops=_muon_flops(line, model, chips if sharding == "zero1" else 1),
    )


def _muon_flops(line: dict[str, str], model: TransformerConfig, chips: int) -> float:
    """FLOPs of Muon's iterations in runs that use it.

    Every chip does all unless the optimizer is said to be split: the published times of the 1.2B
    with and without Muon differ by about that much.
    """
    kind = "muon" if re.search("Muon|nanochat", line["model"]) else "adamw"
    return orthogonalization_flops(model, OptimizerConfig(kind=kind), chips)
