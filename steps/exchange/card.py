"""Write README.md, the card of an exported model on the hub, and DATA.md, the card of its data.

Every number comes from the run's records; what was not recorded is omitted, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.graph.hardware import pod
from pipeline.pages import readable
from pipeline.plan.lineage import Ancestor, lineage
from pipeline.prices import price_of
from pipeline.store import storage
from steps.artifacts import Checkpoint
from steps.exchange.decontamination import data_sources, decontaminated, decontamination
from steps.exchange.source_licenses import escaped, known_licenses, licenses, restrictions
from steps.pages.run_record import TrainingRun, of_checkpoint, split_counts
from steps.scaling_law.points import spent
from steps.tokens.chat_templates import chat_of

_HOUR = 3600.0
_TABLE = ["| | |", "|---|---|"]


def write_cards(
    folder: str,
    model: Checkpoint,
    written: Mapping[str, Any],
    name: str,
    license: str,
    source_licenses: Sequence[str],
    at: int | None,
) -> None:
    """Write both; `at` is the step of the checkpoint that was exported, None for the last."""
    ancestors = lineage([model.path])
    known = known_licenses(ancestors)
    card = [*_front(license), f"# {name}", "", *_model(model, written), *_use(model)]
    card += restrictions(known)
    if not model.imported:
        record = of_checkpoint(model, name, ancestors)
        step = model.result["last"]["step"] if at is None else at
        card += _training(model, record, ancestors, step)
        averaged = model.train.ema or model.train.average_last
        if not averaged or written["parameters"] == "ema":  # a run evaluates its average
            card += _evaluation(record, step)
    card += _lineage(ancestors)
    _write(folder, "README.md", card)
    data = [f"# Data of {name}", "", *_data(model, ancestors), *licenses(known, source_licenses)]
    _write(folder, "DATA.md", data)


def _write(folder: str, name: str, lines: Sequence[str]) -> None:
    text = "\n".join(lines).rstrip() + "\n"
    storage.write_atomic(storage.join(folder, name), text.encode())


def _front(license: str) -> list[str]:
    # JSON is valid YAML, and its quotes keep YAML from reading a string as another type.
    known = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if license:
        known["license"] = license
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in known.items()), "---", ""]


def _rows(facts: Sequence[tuple[str, str]]) -> list[str]:
    return [*_TABLE, *(f"| {what} | {value} |" for what, value in facts if value), ""]


def _model(model: Checkpoint, written: Mapping[str, Any]) -> list[str]:
    config = model.model
    facts = [
        ("architecture", str(written["architecture"])),
        ("parameters", f"{config.parameter_count:,}"),
        ("layers, width, MLP", f"{config.layers}, {config.embed}, {config.mlp}"),
        ("heads, of keys and values", f"{config.heads}, {config.kv_heads} of {config.head_size}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("stored as", f"{written['dtype']}, {written['parameters']} parameters"),
    ]
    return ["## Model", "", *_rows(facts)]


def _use(model: Checkpoint) -> list[str]:
    length = model.train.sequence_length
    if not model.has_text:
        lines = ["It was trained on rows of integers, which have no text and no tokenizer."]
    elif chat_of(model) is not None:
        lines = [
            "A chat model: in training, the chat template of this folder wrote conversations,",
            "as `apply_chat_template` of `transformers` does.",
        ]
    else:
        loaded = model.tokenizer().load()
        bos, eos = (loaded.decode([index]) for index in (loaded.bos_id, loaded.eos_id))
        lines = [
            f"A base model: it continues text. In training a document began with `{bos}` (BOS) and",
            f"ended with `{eos}` (EOS). Begin a text with BOS if the tokenizer does not insert it.",
        ]
    return ["## Use", "", *lines, f"Training sequences had {length:,} tokens.", ""]


def _training(
    model: Checkpoint, record: TrainingRun, ancestors: Sequence[Ancestor], step: int
) -> list[str]:
    train, result = model.train, model.result
    (all_tokens, all_flops), (after, left) = (spent(model.model, train, n) for n in (0, step))
    whole = step == result["last"]["step"]
    seconds, cost = _spent(record, str(result["measured"]["hardware"])) if whole else ("", "")
    # An extension has the steps and tokens of the whole run, and attempts at its last steps only.
    begun = min((a.first_step for a in record.attempts if a.first_step is not None), default=0)
    attempted = f" of the last {step - begun:,} steps" if begun else ""
    facts = [
        ("steps", f"{step:,}"),
        ("tokens", f"{all_tokens - after:,}"),
        ("FLOPs", f"{all_flops - left:.3g} (causal attention, without recomputation)"),
        (f"hardware{attempted}", model.trained_on),
        (f"wall time{attempted}, pauses included", seconds),
        (f"cost{attempted}", cost),
        ("searched for evaluation sets", decontaminated(ancestors)),  # DATA.md says what was found
        ("continues", model.input_paths.get("checkpoint", "").rpartition("/")[2]),
    ]
    return ["## Training", "", *_rows(facts)]


def _spent(record: TrainingRun, hardware: str) -> tuple[str, str]:
    """Wall time of all attempts, and the list price of `hardware` while they held it.

    The price is empty if the attempts were on different devices; both if no times were recorded.
    """
    account = record.account()
    if account is None:
        return "", ""
    used = pod(hardware)
    price = price_of(used.generation) if used.generation else None
    alike = len({(each.device, each.devices) for each in record.attempts}) == 1
    held = used.chips * (account.total - account.parts["dead"]) / _HOUR
    return readable.duration(account.total), price.of(held) if price and alike else ""


def _evaluation(record: TrainingRun, step: int) -> list[str]:
    """The held-out losses at a step; empty if it was not evaluated."""
    every = [(name, row) for name in record.splits for row in record.scores(name)]
    found = {name: row for name, row in every if row["step"] == step}
    if not found:
        return []
    lines = ["## Evaluation", "", "| set | nats per token | bits per byte |", "|---|---|---|"]
    for name, row in found.items():
        bits = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else ""
        lines.append(f"| {name} | {row['loss']:.4f} | {bits} |")
    return [*lines, ""]


def _lineage(ancestors: Sequence[Ancestor]) -> list[str]:
    lines = ["## Lineage", "", "| step | key | commit |", "|---|---|---|"]
    for ancestor in ancestors:
        manifest = ancestor.manifest
        commit = (manifest.provenance.get("git") or {}).get("commit") or ""
        lines.append(f"| {manifest.label} | {manifest.key[:20]} | {commit[:12]} |")
    return [*lines, ""]


def _data(model: Checkpoint, ancestors: Sequence[Ancestor]) -> list[str]:
    lines = ["## Sources", ""]
    sources = sorted({str(summary) for summary in data_sources(model.path, ancestors)})
    lines += [f"- {escaped(source)}" for source in sources] or ["None was recorded."]
    lines.append("")
    if model.imported:
        return lines
    splits, names = split_counts(model.sequences), ("documents", "rows", "tokens", "bytes")
    fields = [field for field in names if all(field in split for split in splits.values())]
    lines += [
        "## Splits",
        "",
        f"| split | {' | '.join(fields)} |",
        f"|{'---|' * (1 + len(fields))}",
    ]
    for name, split in splits.items():
        numbers = [f"{split[field]:,}" for field in fields]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return [*lines, "", *decontamination(ancestors)]
