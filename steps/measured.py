"""Outputs with losses on held-out splits: how they compare beside the noise, for `select`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from pipeline import Artifact
from pipeline.errors import CorruptOutput
from pipeline.graph.artifact import argument_of
from pipeline.identity.fingerprint import digest, without_defaults
from pipeline.store import storage
from pipeline.store.manifest import Manifest, chosen, label_of, readable, resolve_ref

SEQUENCES = "sequences"
_VARIED = ("checkpoint", "sequences")  # inputs whose seeds do not make another recipe
_NAMED = 3  # candidates within noise that a headline names


class Measured(Artifact):
    """An output with losses on held-out splits; in its result, `last` leads to the last ones."""

    last: ClassVar[str] = ""

    def sequence_rows(self) -> list[dict[str, Any]]:
        """Rows of `SequenceLosses` of the last evaluation by split; none in an older output."""
        from training.metrics.metrics_log import read_log

        shards = {shard.name: storage.join(self.home, shard.root) for shard in self.each_shard()}
        if "record" in shards:
            last = self.result["last"]["step"]
            rows = read_log(shards["record"], kinds=[SEQUENCES])
            return [row for row in rows if row["step"] == last]
        if SEQUENCES in shards:
            return storage.read_json(storage.join(shards[SEQUENCES], f"{SEQUENCES}.json"))
        followed = [shards[name] for name in sorted(shards) if name.startswith("score/")][-1:]
        urls = [storage.join(directory, "scores.json") for directory in followed]
        return [row for url in urls for row in storage.read_json(url).get(SEQUENCES, [])]

    @classmethod
    def compared(
        cls, candidates: Sequence[Any], by: str, best: int
    ) -> tuple[list[dict[str, Any]], str]:
        """Differences from the candidate `best` with their standard errors, see `Artifact`."""
        from training.metrics import differences as noise

        figure = by.removeprefix(cls.last)
        rows = [each.result.get("last", each.result) for each in candidates]
        split, *others = {row.get("split") for row in rows}
        if figure not in ("loss", "bits_per_byte") or split is None or others:
            return super().compared(candidates, by, best)
        runs = []
        for each, row in zip(candidates, rows, strict=True):
            found = {one["split"]: one for one in each.sequence_rows()}.get(split)
            # Bits per byte are the loss times a number that the text has.
            losses = found and noise.SequenceLosses.of_row(found, row[figure] / row["loss"])
            recipe, name = recipe_of(each.path, each.manifest), label_of(each.manifest)
            runs.append(noise.RunLoss(name, row[figure], recipe, losses))
        found = list(noise.differences(runs, best))
        data = [{"differences": [d.to_json() for d in found if run.name in d.runs]} for run in runs]
        within = {one.runs: str(one) for one in found if one.within_noise}
        more = f" and {len(within) - _NAMED} more" if len(within) > _NAMED else ""
        names = "; ".join([*within.values()][:_NAMED])
        return data, f"within noise of it: {names}{more}" if within else ""


def recipe_of(path: str, manifest: Manifest) -> str:
    """Digest of what made an output, without the seeds of its training and of the order of data.

    "" where an output that this depends on is gone.
    """
    try:
        path, manifest = chosen(path, manifest)
    except CorruptOutput:
        return ""
    inputs = {}
    for name, read in manifest.inputs.items():
        inputs[name] = read["digest"]
        if argument_of(name) in _VARIED:
            above = resolve_ref(path, read["directory"])
            made = readable(above)
            inputs[name] = recipe_of(above, made) if made else ""
    config = without(without_defaults(manifest.config), ("seed",))
    known = all(inputs.values())
    return digest([manifest.step, manifest.version, config, inputs]) if known else ""


def without(tree: Any, names: Collection[str]) -> Any:
    """A canonical tree without the fields of these names, at any depth."""
    if isinstance(tree, Mapping):
        return {name: without(each, names) for name, each in tree.items() if name not in names}
    return [without(each, names) for each in tree] if isinstance(tree, list) else tree
