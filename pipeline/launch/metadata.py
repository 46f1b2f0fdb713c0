"""Facts of a TPU slice from the metadata server of Google's virtual machines."""

from __future__ import annotations

import functools
import os
import re
import urllib.error
import urllib.request

_SECONDS = 2.0
_TRIES = 3
_UNREACHABLE: set[str] = set()


def attribute(name: str) -> str:
    """An attribute of this instance; empty without the attribute or a metadata server."""
    return _get(f"attributes/{name}")


def region() -> str:
    """Google's region of this machine, such as us-east5; empty on other machines."""
    return _get("zone").rpartition("/")[2].rpartition("-")[0]


def _get(name: str) -> str:
    # Google's own clients read this variable too.
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    if host in _UNREACHABLE:
        return ""
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for _ in range(_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            error.close()
            return ""
        except OSError as error:
            # Elsewhere there is no such host; on Google's machines it may be slow at boot.
            if not isinstance(getattr(error, "reason", error), TimeoutError):
                break
    _UNREACHABLE.add(host)
    return ""


def tpu_environment() -> dict[str, str]:
    """The attribute "tpu-env", lines of `NAME: 'value'`."""
    return dict(re.findall(r"^\s*(\w+):\s*'?([^'\n]*?)'?\s*$", attribute("tpu-env"), re.MULTILINE))


@functools.cache
def known() -> dict[str, str]:
    """The facts found of this host's slice: "type", "topology", "worker id", "name"; for one of
    several slices also "slices" and "slice id"."""
    more = tpu_environment()
    found = {
        "type": attribute("accelerator-type") or more.get("ACCELERATOR_TYPE", ""),
        "topology": more.get("TOPOLOGY", ""),
        "worker id": attribute("agent-worker-number") or more.get("WORKER_ID", ""),
        "name": attribute("instance-id") or more.get("NODE_ID", ""),
        "slices": more.get("MEGASCALE_NUM_SLICES", ""),
        "slice id": more.get("MEGASCALE_SLICE_ID", ""),
    }
    return {name: value for name, value in found.items() if value}
