"""What costs money in a bucket: traffic to another region, and objects that stay when deleted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.errors import PonenteError
from pipeline.store import storage

_SECONDS = 5.0
_CONTINENTS = {"us": "us-", "eu": "europe-", "asia": "asia-"}


def bucket_warnings(prefix: str, region: str = "") -> list[str]:
    """Warnings about the gs:// bucket of `prefix` and machines in `region`, with what to do.

    None where the bucket cannot be read; `region` is empty if unknown.
    """
    about = _about(prefix) if prefix.startswith("gs://") else {}
    return [*filter(None, (_far(prefix, about, region), _kept(prefix, about)))]


def _far(prefix: str, about: Mapping[str, Any], region: str) -> str:
    location = str(about.get("location", "")).lower()
    if location in _CONTINENTS:
        far = not region.startswith(_CONTINENTS[location])
    else:
        # Two-region locations such as nam4 are not compared.
        far = bool(re.fullmatch(r"[a-z]+-[a-z]+\d+", location)) and location != region
    if not far or not region:
        return ""
    return (
        f"the bucket of {prefix} is in {location} and the machines are in {region}: every byte "
        f"between them is billed and slow; make a bucket in {region}"
    )


def _kept(prefix: str, about: Mapping[str, Any]) -> str:
    policy = about.get("softDeletePolicy") or {}
    days = int(policy.get("retentionDurationSeconds", 0)) / 86400
    if not days:
        return ""
    bucket = prefix.removeprefix("gs://").partition("/")[0]
    return (
        f"the bucket of {prefix} bills deleted objects for {days:g} more days, and every replaced "
        "checkpoint is one; turn that off: "
        f"gcloud storage buckets update gs://{bucket} --clear-soft-delete"
    )


def _about(url: str) -> dict[str, Any]:
    try:
        fs, path = storage.filesystem(url, _SECONDS)
        return dict(fs.call("GET", "b/{}", path.partition("/")[0], json_out=True))
    except (PonenteError, OSError):
        return {}  # permission for objects does not include the bucket's metadata
