"""The code that workers get: its digest, a command line that joins a cluster, and stale code."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from pipeline.errors import InputError, StepFailed
from pipeline.execute.ray import backend, runtime_env, workers
from pipeline.execute.request import Ending
from pipeline.graph.step_context import ShardTask
from pipeline.store.ledger import Ledger
from tests.pipeline.execute import cluster as several
from tests.pipeline.execute.cluster import ROOT, imported
from tests.pipeline.helpers import run_on
from tests.pipeline.toy import write_numbers

EXPERIMENT = """
from pipeline import Artifact, Experiment, Result, StepContext, step
from pipeline.store import storage

class Words(Artifact):
    pass

def write(directory: str, item: int) -> dict[str, int]:
    storage.write_atomic(storage.join(directory, "w.txt"), str(item).encode())
    return {"n": item}

@step(output=Words, version=1)
def words(run: StepContext, *, shards: int) -> Result:
    written = run.map(write, {str(i): i for i in range(shards)})
    return {"sum": sum(s.result["n"] for s in written.values())}

@step(output=Words, version=1)
def shown(run: StepContext, words: Words) -> Result:
    return {"headline": [f"the sum is {words.manifest.result['sum']}"]}

def count(shards: int = 3) -> Words:
    return shown(words(shards=shards))

experiment = Experiment(count)
if __name__ == "__main__":
    experiment.main()
"""


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        started = several.start()
        yield started
        started.shutdown()


def _tree(root, files):
    for path in files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"# {path}\n")
    (root / ".gitignore").write_text("/dist/\n/.venv/\nscratch_*.py\n")


def test_what_is_sent_has_the_digest_that_was_told(tmp_path):
    """Packed by Ray and unpacked: ignored and generated files make no difference, others do."""
    from ray._private.runtime_env import packaging

    root, there = tmp_path / "root", tmp_path / "there"
    _tree(root, ["pipeline/a.py", "steps/b/c.py", "top.py"])
    bare = runtime_env.code_digest(root)
    ignored = ["dist/x.py", "experiments/scratch_1.py", ".venv/lib/y.py", "runs/z.py", "tests/t.py"]
    _tree(root, [*ignored, "pipeline/__pycache__/a.py"])
    told = runtime_env.runtime_environment(root)
    assert runtime_env.code_digest(root) == told["env_vars"]["PONENTE_CODE"] == bare
    package = tmp_path / "sent.zip"
    packaging.create_package(str(root), package, True, excludes=told["excludes"])
    with zipfile.ZipFile(package) as sent:
        sent.extractall(there)
    assert sorted(p.name for p in there.rglob("*.py")) == ["a.py", "c.py", "top.py"]
    assert runtime_env.code_digest(there) == bare
    for path in ("pipeline/a.py", "top.py", "pipeline/new.py"):
        (there / path).write_text("# other\n")
        assert runtime_env.code_digest(there) != bare
        shutil.copy(root / path, there / path) if (root / path).exists() else None


@pytest.mark.slow
def test_the_command_line_joins_a_cluster_from_anywhere(cluster, tmp_path):
    """Run in a directory that is not the checkout; steps of the file itself travel by value."""
    (tmp_path / "words.py").write_text(EXPERIMENT)
    command = [sys.executable, "words.py", "--cluster", cluster.address, "--prefix", "store"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 steps executed, 0 reused" in done.stdout
    assert "the sum is 3" in done.stdout


@pytest.mark.slow
def test_a_worker_with_other_code_refuses(cluster, tmp_path):
    """A second checkout on the worker's path loses to what the driver sends; one in front wins."""
    stale = tmp_path / "stale"
    for package in ("pipeline", "tests"):
        shutil.copytree(ROOT / package, stale / package)
    (stale / "pipeline" / "errors.py").open("a").write("\n# another version\n")
    environment = {"PYTHONPATH": str(stale)}
    several.add(cluster, resources={"stale": 1}, env_vars=environment)
    prefix = str(tmp_path / "store")
    with contextlib.closing(backend.RayBackend(cluster.address)) as joined:
        (found,) = run_on(joined, prefix, imported(number=1)).published.values()
    assert "_ray_pkg_" in found.manifest.result["file"]
    (stale / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(stale)!r})\n")
    with (
        contextlib.closing(backend.RayBackend(cluster.address)) as joined,
        pytest.raises(StepFailed, match="runs other code") as refused,
    ):
        run_on(joined, prefix, imported(number=2))
    for tree in (ROOT, stale):
        assert runtime_env.code_digest(tree)[:16] in str(refused.value)
    assert str(stale) in str(refused.value)


def test_a_worker_that_does_not_see_the_store_refuses(tmp_path, monkeypatch):
    """Of a cluster: a path that is there on the driver's host only. Buckets are everywhere."""
    runtime_env.require_store(str(tmp_path / "not there"))
    monkeypatch.setenv("PONENTE_CODE", "0" * 64)
    runtime_env.require_store(str(tmp_path))
    runtime_env.require_store("gs://bucket/not/there")
    with pytest.raises(InputError, match=r"does not see .*not there; .* --prefix gs://"):
        runtime_env.require_store(str(tmp_path / "not there"))


@pytest.fixture
def unseen(tmp_path, monkeypatch) -> str:
    """A step's directory that this process, a worker with the driver's code, does not see."""
    monkeypatch.setenv("PONENTE_CODE", runtime_env._own_digest())
    return str(tmp_path / "store" / "numbers-0")


def test_what_a_worker_would_write_to_a_store_that_it_does_not_see_is_refused(unseen, tmp_path):
    """Of a shard and of a step, before a directory is made that only this host would see."""
    task = ShardTask(Ledger(unseen), "000001-a", "part/000", write_numbers, (0, 1))
    with pytest.raises(InputError, match="does not see ") as refused:
        workers._shard_task(task, None, "h", {}, ())
    outcome = backend._execute(SimpleNamespace(ledger=task.ledger), None, "h", None)
    assert (outcome.ending, outcome.cause) == (Ending.FAILED, str(refused.value))
    assert "\n" not in outcome.cause
    assert list(tmp_path.iterdir()) == []
