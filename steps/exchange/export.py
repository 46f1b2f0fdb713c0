"""Export a trained model: as a Hugging Face folder, a GGUF file, or to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from models.hf.architectures import architecture_of
from models.shape.validation import at_least
from pipeline import InputError, Result, Runtime, StepContext, step
from pipeline.graph.step_context import Reference
from pipeline.store import storage
from steps.artifacts import Checkpoint, GgufModel, HuggingFaceModel
from steps.declared import declared_model, tokenizer_of
from steps.exchange.choices import GGUF_DTYPES, OTHER_TOKENIZER, check_choices
from steps.gang import HUB
from steps.tokens.chat_templates import chat_of
from steps.training.plan.continued import checkpoint_at

_MEMORY = 1 << 30  # bytes; 1.24 B parameters need half of it, see tests/bench/export.py
_REFUSED = (400, 401, 403, 404)  # answers of the hub that another attempt would get again


def _check_hf(arguments: Mapping[str, Any]) -> None:
    check_choices("export_hf", arguments["dtype"], arguments["parameters"])
    at_least("export_hf", shard_bytes=(arguments["shard_bytes"], 1))
    if (model := declared_model(arguments["model"])) is None:
        return
    try:
        found = architecture_of(model)
    except InputError as error:
        raise InputError(
            f"export_hf: {error}; change these fields, or leave this step out"
        ) from error
    tokenizer = tokenizer_of(arguments["model"])
    made_by = tokenizer.step.name if tokenizer is not None else ""
    own = made_by in ("train_tokenizer", "byte_tokenizer")
    if own and found.model_type == "qwen2" and arguments["auto_tokenizer"]:
        raise InputError(
            f"export_hf: AutoTokenizer gives a {found.name} the split of Qwen2's own tokenizer, "
            f"and not that of {made_by}; {OTHER_TOKENIZER}"
        )


def _then_upload(export: Any) -> Any:
    repository = export.runtime["upload"]
    return export if repository is None else upload_hf(export, repository)


@step(
    output=HuggingFaceModel,
    version=2,
    check=_check_hf,
    memory=_MEMORY,
    reads_lineage=True,
    facts=checkpoint_at,
    then=_then_upload,
)
def export_hf(
    run: StepContext,
    model: Checkpoint,
    *,
    at: int | None = None,
    dtype: str = "bfloat16",
    parameters: str = "ema",
    name: str = "model",
    license: str = "",
    source_licenses: tuple[str, ...] = (),
    shard_bytes: int = 5_000_000_000,
    auto_tokenizer: bool = True,
    upload: Annotated[str | None, Runtime] = None,
) -> Result:
    """config.json, safetensors, tokenizer, generation settings, a model card and a data card.

    A model that was trained on rows of integers has no tokenizer, and its folder none either. The
    declaration refuses a shape that no architecture of `transformers` computes.

    Args:
        model: a trained model.
        at: step of the checkpoint to export; None for the last one.
        dtype: "bfloat16" or "float32".
        parameters: "ema" for their moving average (EMA), if the run kept one, or "last".
        name: name of the model in its card.
        license: license of the model, as the hub spells it, such as "apache-2.0"; empty for none.
        source_licenses: licenses of the training data, as text for the data card.
        shard_bytes: most bytes of a safetensors file.
        auto_tokenizer: refuse a tokenizer of which `AutoTokenizer` makes another, as it does of
            those of Qwen2 models that do not split and normalize as Qwen2's own.
        upload: hub repository `owner/name` to upload the folder to by a step of its own, see
            `upload_hf`; None uploads nothing.
    """
    del upload
    from steps.exchange.card import write_cards
    from steps.exchange.hf.hf_folder import Export, write_hf_folder

    export = Export(
        checkpoint=model.at(at),
        config=model.model,
        positions=model.train.sequence_length,
        tokenizer=model.tokenizer().load() if model.has_text else None,
        chat=chat_of(model),
        dtype=dtype,
        parameters=parameters,
        shard_bytes=shard_bytes,
        auto_tokenizer=auto_tokenizer,
    )
    with run.shard("model") as directory:
        written = write_hf_folder(directory, export)
        write_cards(directory, model, written, name, license, source_licenses, at)
    size = f"{written['bytes'] / 1e9:,.2f} GB in {len(written['files'])} files"
    return {**written, "headline": [f"{written['architecture']}, {dtype}, {size}"]}


def _check_upload(arguments: Mapping[str, Any]) -> None:
    repository = arguments["repository"]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise InputError(f"upload: expected a hub repository owner/name, found {repository!r}")


@step(output=HuggingFaceModel, version=1, check=_check_upload, environment=HUB)
def upload_hf(run: StepContext, export: HuggingFaceModel, repository: str) -> Any:
    """The same folder, after it was uploaded to the hub with HF_TOKEN.

    It runs once per export and `repository` (owner/name), which is made, private, if it does not
    exist.
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


def _check_gguf(arguments: Mapping[str, Any]) -> None:
    if (dtype := arguments["dtype"]) not in GGUF_DTYPES:
        raise InputError(
            f"export_gguf.dtype: expected one of {', '.join(GGUF_DTYPES)}, found {dtype!r}; f16 is "
            "exact for most trained weights, q8_0 half as large"
        )
    storage.join("", f"{arguments['name']}.gguf")  # refuses a name that is no file name


@step(output=GgufModel, version=1, check=_check_gguf)
def export_gguf(
    run: StepContext, model: HuggingFaceModel, *, dtype: str = "f16", name: str = "model"
) -> Result:
    """A GGUF file of a model that was exported for Hugging Face.

    Args:
        model: a model of the architecture Llama, Qwen3 or GPT-2.
        dtype: dtype of matrices: f16, bf16, q8_0 or f32.
        name: name of the model in the file; also the start of the file's name.
    """
    from steps.exchange.gguf.file import write_gguf
    from steps.exchange.local_files import read_locally, write_locally

    file = f"{name}-{dtype}.gguf"
    with (
        run.shard("gguf") as directory,
        read_locally(model.folder) as folder,
        write_locally(storage.join(directory, file)) as path,
    ):
        written = write_gguf(folder, path, dtype, name)
    if written.pop("composes"):
        run.warn(
            "the tokenizer normalizes text to NFC and llama.cpp does not: llama.cpp gives other "
            "ids to texts that are not in NFC"
        )
    kind = f"{written['architecture']}, tokenizer {written['pre_tokenizer']}"
    line = f"{file}: {kind}, {written['bytes'] / 1e6:,.1f} MB"
    return {**written, "file": file, "dtype": dtype, "headline": [line]}
