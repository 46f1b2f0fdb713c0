"""Upload an exported model to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline import InputError, StepContext, step
from pipeline.graph.step_context import Reference
from steps.artifacts import HuggingFaceModel
from steps.gang import HUB

_REFUSED = (400, 401, 403, 404)  # answers of the hub that another attempt would get again


def _check(arguments: Mapping[str, Any]) -> None:
    repository = arguments["repository"]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise InputError(f"upload: expected a hub repository owner/name, found {repository!r}")


@step(output=HuggingFaceModel, version=1, check=_check, environment=HUB)
def upload_hf(run: StepContext, export: HuggingFaceModel, repository: str) -> Any:
    """The same folder, after it was uploaded to the hub with HF_TOKEN.

    It runs once per export and repository. The repository is made, private, if it does not exist.

    Args:
        export: an exported model.
        repository: hub repository `owner/name`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from steps.exchange.local_files import read_locally

    del run
    api = HfApi()
    try:
        with read_locally(export.folder) as path:
            api.create_repo(repository, exist_ok=True, private=True)
            commit = api.upload_folder(repo_id=repository, folder_path=path)
    except HfHubHTTPError as error:
        if error.response.status_code not in _REFUSED:
            raise
        raise InputError(f"the hub refused the upload: {error}; see HF_TOKEN") from error
    result = {
        **export.result,
        "repository": repository,
        "measured": {**export.result.get("measured", {}), "commit": commit.oid},
        "headline": [f"uploaded to {repository}, commit {commit.oid[:12]}"],
    }
    return Reference(export, "uploaded", result)
