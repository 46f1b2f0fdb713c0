"""An S3 server in this process, from the optional extra `s3-tests`."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

BUCKET = "bucket"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket; retries do not wait."""
    pytest.importorskip("s3fs", reason="the optional extra s3 is not installed")
    moto = pytest.importorskip("moto.server", reason="the optional extra s3-tests is not installed")
    from pipeline.store import object_storage, s3_storage, storage

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_storage, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(object_storage, "LONGEST_WAIT_SECONDS", 0.01)
    s3_storage.S3Storage.clear_instance_cache()
    # What it keeps belongs to the process, not to the server.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    storage.filesystem(f"s3://{BUCKET}")[0].call_s3("create_bucket", Bucket=BUCKET)
    yield f"s3://{BUCKET}"
    s3_storage.S3Storage.clear_instance_cache()
    server.stop()
