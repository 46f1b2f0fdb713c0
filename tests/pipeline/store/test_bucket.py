"""What a bucket costs is warned of: another region, and deleted objects that are kept."""

from __future__ import annotations

import pytest

from pipeline import doctor
from pipeline.store import bucket
from pipeline.store.bucket import bucket_warnings
from tests.faults import fake_gcs
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
    monkeypatch.setattr(bucket, "_about", lambda url: {"location": location.upper()})
    warnings = bucket_warnings("gs://bucket/runs", machines)
    assert bool(warnings) == far
    if far:
        assert location in warnings[0]
        assert machines in warnings[0]


def test_the_bucket_says_where_it_is():
    """As Google's JSON API has it; a local store has no location."""
    with FakeGCS():
        assert "is in us-central1" in bucket_warnings("gs://bucket/runs", "us-east5")[0]
        assert bucket_warnings("gs://bucket/runs", "us-central1") == []
    assert bucket_warnings("./runs", "us-east5") == []


@pytest.mark.parametrize(("seconds", "days"), [("604800", "7"), ("7776000", "90"), ("0", "")])
def test_a_bucket_that_keeps_deleted_objects_is_named_with_the_command(monkeypatch, seconds, days):
    """By launch and by doctor, which passes the store otherwise; not where that is off."""
    monkeypatch.setattr(
        fake_gcs, "BUCKET_FACTS", {"softDeletePolicy": {"retentionDurationSeconds": seconds}}
    )
    with FakeGCS():
        found = doctor.store("gs://bucket/runs")
        (*advice,) = bucket_warnings("gs://bucket/runs", "us-central1")
    assert found.status == ("warn" if days else "ok")
    assert [found.advice] == (advice or [""])
    if days:
        assert f"for {days} more days" in found.advice
        assert "gcloud storage buckets update gs://bucket --clear-soft-delete" in found.advice
