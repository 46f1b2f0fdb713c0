"""What looking at a run costs a step: metrics, metrics.jsonl, loader, idle profiler.

    python -m tests.bench.overhead [--rounds 5] [--step-ms 200]

One JSON object a line. No model: the host does what it does for a step, with arrays that are ready,
and sleeps for the rest of 200 ms as it would wait for a device. What the process then works is the
overhead alone, all threads together: `cpu_ms` a step; `main_ms` is how long the loop's thread was
held up. Both are medians over rounds, and `nothing` is what the bench itself takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data.batches.dataset import Dataset, DatasetSpec, TokenSource
from data.batches.loader import Loader
from data.cache.token_shard import TokenShard, write_shard
from tests.training import tiny
from training.metrics.recorder import PeakMemory, Recorder, Throughput
from training.metrics.stopwatch import TimedBatches
from training.trainer.run_context import run_context

VOCAB, LENGTH = 512, 256
PARTS = ("metrics", "feed", "trackers", "profiler", "loader")


class Host:
    """What the loop's host does beside the step, by part; parts that are off do nothing."""

    def __init__(self, root: str, parts: tuple[str, ...], batch: int, stack: ExitStack) -> None:
        self.parts, self.before = parts, None
        job = tiny.make_job(root, run_directory=tempfile.mkdtemp(dir=root))
        self.observer = run = stack.enter_context(run_context(job))
        assert run.log is not None
        assert run.profiler is not None
        if "trackers" not in parts:
            run.log.close(10.0)
            run.log = None
        if "profiler" not in parts:
            run.profiler.close()
            run.profiler = None
        batches = itertools.repeat(
            np.random.default_rng(0).integers(0, VOCAB, (batch, LENGTH), "i4")
        )
        if "loader" in parts:
            dataset = stack.enter_context(Dataset(spec(root)))
            batches = iter(stack.enter_context(Loader(dataset, batch_size=batch)))
        self.feed: Any = TimedBatches(batches, run.watch) if "feed" in parts else batches
        self.recorder: Any = None
        if "metrics" in parts:
            kind = jax.devices()[0].device_kind
            throughput = Throughput.of(tiny.MODEL, batch, LENGTH, kind, 1)
            memory = PeakMemory(jax.local_devices())
            self.recorder = Recorder(run.row, run.watch, throughput, 10, memory=memory)

    def turn(self, step: int, metrics: dict[str, Any]) -> None:
        """Everything of one step, whose metrics these are."""
        next(self.feed)
        if self.observer.profiler is not None:
            assert not self.observer.profiler.due(step)
        if "feed" in self.parts:
            self.feed.set_inflight(metrics["loss"])
        if self.recorder is not None:
            self.recorder.push(step, metrics)
            return
        # Without metrics a loop still may not run ahead of the device for ever.
        if self.before is not None:
            float(self.before["loss"])
        self.before = metrics
        if "trackers" in self.parts:
            self.observer.row({"step": step, "loss": 1.0})


def spec(root: str) -> Any:
    """The tokens that the loader reads."""
    shards = (TokenShard(f"{root}/tokens", 2_000_000, ""),)
    source = TokenSource(name="random", shards=shards, io_block_size=64, window_blocks=64, seed=7)
    return DatasetSpec(sources=(source,), sequence_length=LENGTH, vocab_size=VOCAB, eos_id=0)


def write_tokens(root: str) -> None:
    """Two million random tokens."""
    ids = np.random.default_rng(0).integers(1, VOCAB, 1_960_000).astype(np.uint16)
    lengths = np.full(40_000, 49)
    write_shard(f"{root}/tokens", [(ids, lengths)], vocab_size=VOCAB, eos_id=0)


def paced(root: str, parts: tuple[str, ...], options: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds a step of the loop's thread and of all processors, with some parts."""
    names = ("loss", "grad_norm", "parameter_norm", "learning_rate", "tokens", "skipped")
    ready = [{name: jnp.float32(n) * 0 for name in names} for n in range(4)]
    main, pace = 0.0, options.step_ms / 1e3
    with ExitStack() as stack:
        host = Host(root, parts, options.batch, stack)
        for step in range(1, 6):
            host.turn(step, ready[0])
        time.sleep(0.5)
        began, worked = time.perf_counter(), time.process_time()
        for step in range(6, 6 + options.steps):
            turned = time.perf_counter()
            host.turn(step, ready[step % 4])
            main += time.perf_counter() - turned
            time.sleep(max(0.0, began + (step - 5) * pace - time.perf_counter()))
        worked = time.process_time() - worked
    return main / options.steps * 1e3, worked / options.steps * 1e3


def rounds(root: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every part alone and all together, by turns; medians, and what is over the bench's own."""
    alone = [(part,) for part in PARTS if part != "feed"]
    variants = [(), *alone, ("loader", "feed"), PARTS]
    spent = {parts: [] for parts in variants}
    for _ in range(options.rounds):
        for parts in variants:
            spent[parts].append(paced(root, parts, options))
    lines = []
    for parts, found in spent.items():
        line: dict[str, Any] = {"parts": list(parts) or ["nothing"], "rounds": len(found)}
        for n, name in enumerate(("main", "cpu")):
            middle = statistics.median(each[n] for each in found)
            over = middle - statistics.median(each[n] for each in spent[()])
            line |= {
                f"{name}_ms": round(middle, 4),
                f"{name}_ms_over_nothing": round(over, 4),
                f"{name}_share_of_step": round(over / options.step_ms, 5),
            }
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print one line a measurement."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--rounds", type=int, default=5, help="of paced measurements")
    flags.add_argument("--steps", type=int, default=20, help="in a round")
    flags.add_argument("--step-ms", type=float, default=200.0)
    flags.add_argument("--batch", type=int, default=8)
    options = flags.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as root:
        write_tokens(root)
        for line in rounds(root, options):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
