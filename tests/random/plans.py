"""Random runs on random numbers of devices: what `plan` accepts, a run can trace; or both refuse.

A trial draws model, batches, schedules and mesh, many of which do not fit each other. `plan` asks
`resolve_run`; the oracle is JAX, which traces the first step of every phase and an evaluation on
virtual CPU devices, as far as is possible without arrays and without a compiler.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from models.shape.config import TransformerConfig
from pipeline import pod
from pipeline.errors import InputError
from steps.platforms import devices_of
from tests.faults.registry import Fault, trials
from training.config import (
    SPLIT_TABLES,
    AxisRules,
    Group,
    OptimizerConfig,
    Parallelism,
    TrainConfig,
)
from training.config.optimizer import Kind
from training.cost.resolved_run import resolve_run
from training.step.program import Program, build_programs


def random_runs(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Trials by their outcome: accepted, refused by a configuration, refused by the plan."""
    del workspace
    figures = Counter[str]()

    def trial(number: int) -> None:
        draw = random.Random(number)
        devices = draw.choice((1, 2, 4, 8, 6))
        try:
            model, optimizer, train = _model(draw), _optimizer(draw), _train(draw)
        except InputError:
            figures["impossible configurations"] += 1
            return
        done = draw.choice((0, 0, 0, 3, train.steps - 1))
        hardware = devices_of(pod(f"cpu-1x{devices}"))
        planned = _refusal(lambda: resolve_run(model, optimizer, train, hardware, done=done))
        found = jax.devices()[:devices]
        programs = []
        ran = _refusal(
            lambda: programs.append(
                build_programs(model, optimizer, train, found, eos_id=0, done=done)
            )
        )
        assert planned == ran, f"plan: {planned}; run: {ran}"
        if planned:
            figures["refused"] += 1
            return
        for _, program in programs[0].phases:
            program.step.trace(program.abstract, program.abstract_batch())
        _evaluate(programs[0].largest, train)
        figures["traced"] += 1

    return {"trials": trials(seed, count, trial), **figures}


def _refusal(call: Any) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def _evaluate(program: Program, train: TrainConfig) -> None:
    layout = program.layout
    rows = layout.whole_batch(train.evaluation_batch)
    assert rows % layout.batch_shards == 0

    def ids(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch)

    sizes = jax.ShapeDtypeStruct((program.model.vocab_size,), jnp.int32, sharding=layout.replicated)
    batch = ids(rows, train.sequence_length), ids(rows)
    jax.eval_shape(program.evaluation_step, program.abstract.model, *batch, sizes)


def _model(draw: random.Random) -> TransformerConfig:
    kv_heads = draw.choice((1, 2, 3, 4))
    learned, qk_norm, tied = (draw.random() < share for share in (0.2, 0.3, 0.5))
    return TransformerConfig(
        vocab_size=draw.choice((64, 257)),
        vocab_multiple=draw.choice((1, 1, 4, 64)),
        layers=draw.choice((1, 2, 3)),
        embed=draw.choice((16, 32, 24, 20)),
        heads=kv_heads * draw.choice((1, 2)),
        kv_heads=kv_heads,
        head_size=draw.choice((4, 8)),
        mlp=draw.choice((32, 48, 36, 50)),
        mlp_kind=draw.choice(("swiglu", "gelu")),
        biases=draw.random() < 0.3,
        qk_norm=qk_norm,
        query_key_scale=draw.choice((1.0, 1.2)) if qk_norm else 1.0,
        tied=tied,
        head_std=None if tied else draw.choice((None, 0.001)),
        residual_scale=draw.choice((None, None, (1.15, 1.05))),
        input_scale=draw.choice((None, None, (0.2, 0.05))),
        value_embeddings=draw.choice(("none", "none", "alternate")),
        positions="learned" if learned else "rotary",
        context=draw.choice((16, 64)) if learned else None,
    )


def _optimizer(draw: random.Random) -> OptimizerConfig:
    kinds: tuple[Kind | None, ...] = (None, None, "adamw", "lion")
    own, schedule = draw.random() < 0.3, draw.choice(("cosine", "wsd"))
    return OptimizerConfig(
        kind=draw.choice(("adamw", "muon", "lion")),
        moment_dtype=draw.choice(("float32", "bfloat16")),
        schedule=schedule,
        warmup=draw.choice((0, 0, 0.1, 1, 7)),
        muon_row_beta=draw.choice((None, None, 0.9)),
        muon_momentum_end=draw.choice((None, 0.9)) if schedule == "wsd" else None,
        weight_decay_schedule=draw.choice(("constant", "constant", "linear")),
        cautious_decay=draw.random() < 0.3,
        matrices=Group(kind=draw.choice((*kinds, "muon"))) if own else Group(),
        head=Group(kind=draw.choice(kinds), learning_rate=4e-3) if own else Group(),
        vectors=Group(kind=draw.choice(kinds), weight_decay=0.1) if own else Group(),
    )


def _train(draw: random.Random) -> TrainConfig:
    sizes = (8, 16, 24, 32, 48, draw.choice((1, 2, 3, 6)))
    starts = (1, 2, 4, 9)
    rules = draw.choice((AxisRules(), AxisRules(), SPLIT_TABLES))
    return TrainConfig(
        steps=draw.choice((3, 8, 8, 20)),
        batch_size=draw.choice(sizes),
        sequence_length=draw.choice((16, 24, 32)),
        separate_documents=draw.random() < 0.3,
        microbatches=draw.choice((1, 1, 1, 2, 4)),
        compute_dtype=draw.choice(("float32", "bfloat16")),
        ema=(ema := draw.choice((0.0, 0.0, 0.9))),
        average_last=0.0 if ema else draw.choice((0.0, 0.25, 2)),
        spike_guard=draw.choice((0.0, 3.0)),
        batch_schedule=tuple((s, draw.choice(sizes)) for s in starts if draw.random() < 0.15),
        length_schedule=tuple(
            (s, draw.choice((1, 2, 4))) for s in (0, *starts) if draw.random() < 0.15
        ),
        evaluate_batch_size=draw.choice((None, None, 3, 8)),
        attention=draw.choice(
            (*["auto"] * 8, "reference", "blockwise", "splash", "cudnn", "triton")
        ),
        remat=draw.choice(("auto", "auto", "none", "full", "matmuls")),
        loss_chunks=draw.choice((*["auto"] * 3, 1, 4)),
        parallel=Parallelism(
            sharding=draw.choice(("auto", "replicated", "zero1", "fsdp")),
            group=draw.choice((*["all"] * 5, 1, 2, 3)),
            sequence=draw.choice((*[1] * 5, 2, 4)),
            tensor=draw.choice((*[1] * 5, 2, 2, 3, 4)),
            rules=rules,
        ),
    )


SUITES = (Fault("runs that fit their devices or not, against JAX", 6, 500, random_runs),)
