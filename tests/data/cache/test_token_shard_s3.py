"""Token shards and checkpoints on s3://, by TensorStore: the files that a disk holds."""

from __future__ import annotations

import numpy as np
import pytest

from data.cache import token_shard
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from pipeline.errors import CorruptOutput, InputError
from pipeline.store import storage
from tests.faults.s3_server import s3
from training.checkpoint.files import Deadline, open_files

__all__ = ["s3"]


def test_files_of_a_checkpoint(s3):
    """What was written is read; what is not there, or has another size, is damage."""
    files = open_files(storage.join(s3, "checkpoint"), Deadline(60, "test"))
    files.write("arrays/a0/c.0", b"abc", b"de")
    first, rest = np.zeros(2, np.uint8), np.zeros(3, np.uint8)
    files.read("arrays/a0/c.0", first, rest)
    assert (bytes(first), bytes(rest)) == (b"ab", b"cde")
    with pytest.raises(CorruptOutput, match="5 bytes instead of 2"):
        files.read("arrays/a0/c.0", first)
    with pytest.raises(CorruptOutput, match="no file"):
        files.read("arrays/a1/c.0", first)


@pytest.mark.parametrize("url", ["abfs://container/x", "https://example.com/x"])
def test_another_store_is_refused(url):
    """Before anything is written; as the store of outputs too."""
    with pytest.raises(InputError, match="use a local path, gs:// or s3://"):
        open_files(url, Deadline(60, "test"))
    with pytest.raises(InputError, match="conditional write"):
        storage.normalise(url)


def test_a_file_url_is_a_local_path(tmp_path):
    """Shards, checkpoints and outputs lie where the path says."""
    url = tmp_path.as_uri()
    open_files(url, Deadline(60, "test")).write("a", b"abc")
    assert (tmp_path / "a").read_bytes() == b"abc"
    assert storage.normalise(url) == str(tmp_path)
    ids = np.arange(1, 9, dtype=np.uint32)
    counts = token_shard.write_shard(f"{url}/s", [(ids, np.array([8]))], vocab_size=500, eos_id=0)
    with TokenArray([TokenShard(f"{url}/s", counts.tokens, counts.check)], 500) as array:
        assert array.read(np.array([0]), 9).tolist() == [[*range(1, 9), 0]]
