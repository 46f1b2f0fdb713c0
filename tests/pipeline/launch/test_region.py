"""A bucket far from the machines is warned of."""

from __future__ import annotations

import pytest

from pipeline.launch import region
from pipeline.launch.region import bucket_location, region_warning
from tests.faults.fake_gcs import FakeGCS


@pytest.mark.parametrize(
    ("location", "machines", "far"),
    [
        ("us-east5", "us-east5", False),
        ("us-east1", "us-east5", True),
        ("us", "us-east5", False),
        ("eu", "us-east5", True),
        ("asia", "asia-northeast1", False),
        ("nam4", "us-east5", False),
        ("", "us-east5", False),
        ("us-east1", "", False),
    ],
)
def test_a_bucket_in_another_region_is_named(monkeypatch, location, machines, far):
    """Regions are compared, continents too; what is unknown is not warned of."""
    monkeypatch.setattr(region, "bucket_location", lambda url: location)
    warning = region_warning("gs://bucket/runs", machines)
    assert bool(warning) == far
    if far:
        assert location in warning
        assert machines in warning


def test_the_bucket_says_where_it_is():
    """As Google's JSON API has it; a bucket that is not there has no location."""
    with FakeGCS():
        assert bucket_location("gs://bucket/runs") == "us-central1"
    assert region_warning("./runs", "us-east5") == ""
