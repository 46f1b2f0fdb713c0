"""The main job's training step on a pod of two CPU processes: the pod against one process."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.run_200m import experiment
from pipeline import pod
from pipeline.execute.backend import InlineBackend
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import as_node
from pipeline.store.outputs import Store
from steps.artifacts import Checkpoint, Completions
from steps.documents.sample import sample
from steps.evaluation.generate import generate
from steps.tokens.sequences import block_shuffle
from steps.tokens.token_cache import tokenize
from steps.tokens.tokenizer import train_tokenizer
from steps.training.train import train

pytestmark = pytest.mark.slow
SMOKE = experiment.presets["smoke"]
CONFIG = dataclasses.replace(
    SMOKE.training, steps=6, batch_size=8, sequence_length=64, evaluate_every=3, evaluate_batches=2
)
MODEL = dataclasses.replace(SMOKE.model, vocab_size=512, layers=2, embed=64, mlp=96, head_size=16)


def _graph(hardware):
    documents = sample(SMOKE.source, tokens=60_000, splits=(("validation", 5_000),))
    tokenizer = train_tokenizer(documents, vocab_size=MODEL.vocab_size)
    tokens = tokenize(documents, tokenizer)
    sequences = block_shuffle(tokens, sequence_length=64, io_block_size=4, window_blocks=16)
    model = train(
        sequences, model=MODEL, optimizer=SMOKE.optimizer, train=CONFIG, hardware=pod(hardware)
    )
    text = generate(model, prompts=("The",), new_tokens=4, temperature=0, hardware=pod(hardware))
    return model, text


@pytest.fixture(scope="module")
def trained(tmp_path_factory, ray_backend):
    """The same graph in this process and on a pod of two with two devices each."""
    found = {}
    for hardware in ("local", "cpu-2x2"):
        store = str(tmp_path_factory.mktemp(hardware))
        log = EventLog(store, "test", [])
        nodes = [as_node(n) for n in _graph(hardware)]
        execution = Execution(nodes, Store(store), log, "again")
        backend = ray_backend if hardware != "local" else InlineBackend(log)
        execution.run(backend, execution.look())
        found[hardware] = {
            kind.__name__: kind(there.path, there.manifest)
            for kind, node in zip((Checkpoint, Completions), nodes, strict=True)
            if (there := execution.published[node.key])
        }
    return found


def test_hardware_is_not_part_of_the_key(trained):
    """The pod's model and the laptop's are the same output."""
    keys = {artifacts["Checkpoint"].manifest.key for artifacts in trained.values()}
    assert len(keys) == 1
    assert trained["cpu-2x2"]["Checkpoint"].trained_on == "cpu-2x2: 4 x cpu"


def test_losses_on_the_pod_are_those_of_one_process(trained):
    """Training and validation losses agree within 1e-5 at every step."""
    rows = {h: a["Checkpoint"].rows("history") for h, a in trained.items()}
    losses = {h: np.array([row["loss"] for row in r]) for h, r in rows.items()}
    assert len(losses["local"]) == CONFIG.steps
    np.testing.assert_allclose(losses["cpu-2x2"], losses["local"], rtol=0, atol=1e-5)
    evaluations = {h: a["Checkpoint"].rows("evaluations") for h, a in trained.items()}
    np.testing.assert_allclose(
        [row["loss"] for row in evaluations["cpu-2x2"]],
        [row["loss"] for row in evaluations["local"]],
        rtol=0,
        atol=1e-5,
    )
    assert [row["step"] for row in evaluations["local"]] == [0, 3, 6]


def test_the_pods_model_writes_what_the_laptops_does(trained):
    """Greedily, each process on a device of its own."""
    local, pods = (trained[h]["Completions"].result["completions"] for h in ("local", "cpu-2x2"))
    assert pods == local
    assert local[0]["completion"]
