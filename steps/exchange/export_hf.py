"""Export a trained model as a folder for Hugging Face `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from models.hf.architectures import architecture_of
from models.shape.config import TransformerConfig
from models.shape.validation import at_least
from pipeline import InputError, Result, Runtime, StepContext, step
from steps.artifacts import Checkpoint, HuggingFaceModel, Tokenizer
from steps.declared import nearest, nearest_setting
from steps.exchange.upload_hf import upload_hf
from steps.training.plan.continued import checkpoint_at

_MEMORY = 1 << 30  # bytes; 1.24 B parameters need half of it, see tests/bench/export.py


def _check(arguments: Mapping[str, Any]) -> None:
    from steps.exchange.choices import OTHER_TOKENIZER, check_choices

    check_choices("export_hf", arguments["dtype"], arguments["parameters"])
    at_least("export_hf", shard_bytes=(arguments["shard_bytes"], 1))
    model = nearest_setting(arguments["model"], "model", Checkpoint)
    if not isinstance(model, TransformerConfig):
        return
    try:
        found = architecture_of(model)
    except InputError as error:
        raise InputError(
            f"export_hf: {error}; change these fields, or leave this step out"
        ) from error
    made_by = next((node.step.name for node in nearest(arguments["model"], Tokenizer)), "")
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
    version=1,
    check=_check,
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

    A model that was trained on rows of integers has no tokenizer, and its folder none either.

    The declaration of the step refuses a shape that no architecture of `transformers` computes.

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
        dtype=dtype,
        parameters=parameters,
        shard_bytes=shard_bytes,
        auto_tokenizer=auto_tokenizer,
    )
    with run.shard("model") as directory:
        written = write_hf_folder(directory, export)
        write_cards(directory, model, written, name, license, source_licenses)
    size = f"{written['bytes'] / 1e9:,.2f} GB in {len(written['files'])} files"
    return {**written, "headline": [f"{written['architecture']}, {dtype}, {size}"]}
