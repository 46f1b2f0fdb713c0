"""Orbax's side of the checkpoint bench; runs in any environment that has orbax-checkpoint.

    python checkpoint_orbax.py OPTIONS     a JSON object: work, shapes, repeat

Asynchronous, OCDBT + zarr3. A second line has what it takes to be told of damage that TensorStore's
checksums do not find: every file's SHA-256 after a save and before a restore.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import checkpoint_measure as common  # pyrefly: ignore
import numpy as np


def _digests(directory: str) -> None:
    for path in common.files(directory):
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")


def main() -> None:
    """Print one line without digests, one with them."""
    options = json.loads(sys.argv[1])
    import jax

    began = time.perf_counter()
    import orbax.checkpoint as ocp

    imported = round(time.perf_counter() - began, 2)
    state = jax.device_put(common.values(options["shapes"]), jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )

    def handler() -> Any:
        return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)

    for digests in (False, True):
        writer = ocp.AsyncCheckpointer(handler(), timeout_secs=600)

        def directory(step: int, digests: bool = digests) -> str:
            return f"{options['work']}/{'digests' if digests else 'plain'}-{step}"

        def save(step: int, digests: bool = digests, writer: Any = writer) -> Any:
            writer.save(directory(step), args=ocp.args.PyTreeSave(state))

            def wait() -> None:
                writer.wait_until_finished()
                shutil.rmtree(directory(step - 2), ignore_errors=True)
                if digests:
                    _digests(directory(step))

            return wait

        def restore(step: int, digests: bool = digests) -> Any:
            if digests:
                _digests(directory(step))
            arguments = ocp.args.PyTreeRestore(
                like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
            )
            with ocp.Checkpointer(handler()) as reader:
                return jax.block_until_ready(reader.restore(directory(step), args=arguments))

        line = common.measure(
            "orbax with SHA-256 of every file" if digests else "orbax",
            *(save, restore, directory, [np.asarray(x) for x in state.values()]),
            options["repeat"],
            import_s=imported,
            versions=common.versions("orbax-checkpoint", "tensorstore", "jax"),
        )
        writer.close()
        common.emit(line)


if __name__ == "__main__":
    main()
