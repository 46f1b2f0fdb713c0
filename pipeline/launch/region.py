"""Whether a bucket is in the machines' region: traffic between regions is slow and billed."""

from __future__ import annotations

import re

from pipeline.errors import PonenteError
from pipeline.store import storage

_SECONDS = 5.0
_CONTINENTS = {"us": "us-", "eu": "europe-", "asia": "asia-"}


def region_warning(prefix: str, region: str) -> str:
    """A warning if the bucket of `prefix` is outside `region`; else empty.

    Args:
        prefix: the store's URL; only gs:// has a location.
        region: Google's region of the machines, such as us-east5.
    """
    location = bucket_location(prefix) if region and prefix.startswith("gs://") else ""
    if location in _CONTINENTS:
        far = not region.startswith(_CONTINENTS[location])
    else:
        # Two-region locations such as nam4 are not compared.
        far = bool(re.fullmatch(r"[a-z]+-[a-z]+\d+", location)) and location != region
    if not far:
        return ""
    return (
        f"the bucket of {prefix} is in {location} and the machines are in {region}: every byte "
        f"between them is billed and slow; make a bucket in {region}"
    )


def bucket_location(url: str) -> str:
    """Location of a gs:// bucket, in lower case; empty if it cannot be read."""
    try:
        fs, path = storage.filesystem(url, _SECONDS)
        about = fs.call("GET", "b/{}", path.partition("/")[0], json_out=True)
    except (PonenteError, OSError):
        return ""  # permission for objects does not include the bucket's metadata
    return str(about.get("location", "")).lower()
