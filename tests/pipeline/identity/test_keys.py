"""Keys are the same in every process, under every Python, and next year."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import keys
from tests.pipeline.identity import key_values

ROOT = Path(__file__).parents[3]

# The package's own __init__ imports fsspec; the fingerprint needs only the standard library, and a
# Python without any dependency can import it through a bare package of the same name.
_SCRIPT = """
import json, sys, types
package = types.ModuleType("pipeline")
package.__path__ = [sys.argv[1] + "/pipeline"]
sys.modules["pipeline"] = package
bounds = types.ModuleType("msgspec")  # only refuses settings, and no digest depends on it
bounds.Meta, bounds.ValidationError = lambda **bound: str(bound), ValueError
bounds.convert = lambda value, kind: value
sys.modules["msgspec"] = bounds
sys.path.insert(0, sys.argv[1])
from tests.pipeline.identity.key_values import digests
assert not {"fsspec", "numpy", "jax"} & set(sys.modules)
print(json.dumps([list(sys.version_info[:2]), digests()]))
"""


def _digests(python: str, seed: str) -> tuple[tuple[int, int], dict[str, str]]:
    done = subprocess.run(
        # -S and -E: nothing that is installed, no variable of the caller's.
        [python, "-S", "-c", _SCRIPT, str(ROOT)],
        env={"PYTHONHASHSEED": seed, "PATH": os.environ.get("PATH", "")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    version, digests = json.loads(done.stdout)
    return (version[0], version[1]), digests


def _interpreter(version: str) -> str | None:
    """A working interpreter of that version; None when this machine has none."""
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    for path in (shutil.which(f"python{version}"), *map(str, managed)):
        # A version manager's shim is there for versions that are not switched on.
        if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0:
            return path
    return None


@pytest.mark.slow
def test_keys_do_not_depend_on_the_hash_seed():
    """Twenty processes, twenty seeds, one set of digests: this process's."""
    here = key_values.digests()
    assert len(here) > 180
    for seed in ("0", *(str(1000003 * n + 17) for n in range(19))):
        assert _digests(sys.executable, seed)[1] == here, f"PYTHONHASHSEED={seed}"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_keys_do_not_depend_on_the_python_version(version):
    """Every supported Python computes the digests of the golden file."""
    python = _interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    found, digests = _digests(python, "7")
    assert found == tuple(map(int, version.split(".")))
    assert digests == json.loads(keys.PATH.read_text())["values"]


@pytest.mark.parametrize("part", ["values", "steps", "runtime"])
def test_keys_are_those_of_the_golden_file(part):
    """A key changes on purpose or not at all."""
    written = json.loads(keys.PATH.read_text())
    assert keys.current()[part] == written[part], (
        "keys changed, and everything built under the old ones will be built again; if that is "
        "meant, write them anew with: python -m tests.golden.keys"
    )
