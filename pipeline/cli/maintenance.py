"""Verbs that maintain a store: verify, collect garbage, adopt outputs, end leases, doctor."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import Any

from pipeline.cli.context import Context, say
from pipeline.cli.inspection import say_json
from pipeline.errors import InputError, PonenteError, StoreUnavailable
from pipeline.execute import reference
from pipeline.graph.declaration import load_experiment
from pipeline.graph.order import topological, unique_labels
from pipeline.graph.step import Node
from pipeline.identity.fingerprint import difference
from pipeline.pages.readable import duration
from pipeline.plan.plan import FEW, shards_line
from pipeline.plan.state import each_named, read_state
from pipeline.store import integrity, lease, storage
from pipeline.store.garbage import Garbage, delete, find_garbage
from pipeline.store.manifest import Manifest, load, load_keyed, readable
from pipeline.store.parallel import by_item, concurrently
from pipeline.store.protection import Keep

_WRITTEN = {"kept": "--keep-shards kept", "continued": "continued from"}


def verify(context: Context) -> int:
    """Compare the bytes of outputs with their digests; status 1 unless every output is sound.

    An output is "missing" if it was never published, here or in a shared store, and "mixed" if
    shards in it were written by other code of its step than the rest.
    """
    storage.list_names(context.store.prefix)  # raises if the store is unreachable
    found: list[dict[str, Any]] = []
    for node in context.steps():
        path = context.store.path(node)
        try:
            manifest = load_keyed(path, node.key)
            if manifest is None and (there := context.store.find(node)) is not None:
                path, manifest = there.path, there.manifest
            problems = list(integrity.problems(path, manifest)) if manifest else []
        except StoreUnavailable:
            raise
        except PonenteError as error:
            manifest, problems = None, [" ".join(str(error).split())]
        other = manifest.provenance.get("other_code") or {} if manifest else {}
        state = "missing" if manifest is None else "mixed" if "kept" in other else "sound"
        state = "corrupt" if problems else state
        problems += [f"{_WRITTEN[how]} {shards_line(what)}" for how, what in other.items()]
        size = manifest.size if manifest else 0
        found.append(
            {"label": node.label, "path": path, "state": state, "bytes": size, "problems": problems}
        )
        if not context.options.json:
            _say_verified(node.label, state, manifest, problems)
            if path != context.store.path(node):
                say(f"  in the shared store: {path}")
    counts = {s: sum(e["state"] == s for e in found) for s in ("corrupt", "mixed", "missing")}
    if context.options.json:
        say_json({"store": context.store.prefix, "outputs": found, **counts})
    else:
        checked = [each["bytes"] for each in found if each["state"] != "missing"]
        wrong = ", ".join(f"{n} {s}" for s, n in counts.items() if n or s == "corrupt")
        say(f"{len(checked)} outputs, {sum(checked):,} bytes read, {wrong}")
    return 1 if any(counts.values()) else 0


def _say_verified(label: str, state: str, manifest: Manifest | None, problems: list[str]) -> None:
    if state == "missing":
        say(f"{label:<16} missing: nothing was published; ponente run builds it")
        return
    files = sum(len(shard.files) for shard in manifest.shards) if manifest else 0
    about = f"{files:,} files, {manifest.size:,} bytes" if manifest and files else ""
    about = about or ("0 files; result in the manifest" if manifest else "")
    say(f"{label:<16} {state}{f', {about}' if about else ''}")
    for problem in problems:
        say(f"  {problem}")
    if manifest and state in ("corrupt", "mixed"):
        say(f"  build it again with --force {shlex.quote(label)}")


def gc(context: Context) -> int:
    """List objects that no preset and no recorded run needs; delete them with --delete."""
    o = context.options
    assert context.experiment is not None
    experiments = [context.experiment, *map(load_experiment, context.words)]
    presets = [node for e in experiments for preset in e.presets for node in e.graph(preset)]
    nodes = topological([*context.targets, *presets])
    keep = Keep(not o.presets_only, o.older_than, _kept(context, nodes))
    report = find_garbage(context.store, nodes, keep)
    total = sum(item.size for item in report.garbage)
    objects = f"{len(report.garbage)} objects ({total:,} bytes)"
    prefix, deletes = context.store.prefix, o.delete and bool(report.garbage)
    if not o.json:
        for line in report.left:
            say(f"left: {line}")
        names = concurrently(lambda item: _called(item, nodes), report.garbage, prefix)
        for item, name in zip(report.garbage, names, strict=True):
            age = "?" if item.age is None else duration(item.age)
            cost = "" if item.cost is None else f", took {duration(item.cost)} to build"
            say(f"{item.size:>16,}  {item.url}  ({name}{item.why}; {age} old{cost})")
    freed, left = 0, []
    if deletes:
        confirm(context, f"delete {objects} from {prefix}")
        freed, left = delete(context.store, report.garbage, wait=lease.STALE_SECONDS + 1)
    if o.json:
        items = [
            {"url": i.url, "bytes": i.size, "reason": i.why, "age": i.age, "cost": i.cost}
            for i in report.garbage
        ]
        about = {"store": prefix, "objects": items, "left": [*report.left, *left]}
        say_json({**about, "bytes": total, "freed": freed})
        return 0
    for line in left:
        say(f"left: {line}")
    hint = "; pass --delete" if report.garbage else ""
    say(f"{freed:,} bytes deleted" if deletes else f"{objects} can be deleted{hint}")
    return 0


def _kept(context: Context, nodes: list[Node]) -> frozenset[str]:
    """Directories of the outputs that --keep names: by label, by step, or by their paths.

    Also of outputs of earlier settings. Raises `InputError` for a name of none.
    """
    given, prefix = context.options.keep, context.store.prefix
    if not given:
        return frozenset()

    def recorded(name: str) -> set[str]:
        found = readable(storage.join(prefix, name))
        return {name.rpartition("-")[0], *([found.label, found.step] if found else ())}

    names = by_item(recorded, context.store.outputs(), prefix)
    apart = unique_labels(nodes)
    for node in nodes:
        also = {node.step.name, apart[node.key], *node.labels}
        names[node.directory] = names.get(node.directory, set()) | also

    def called(word: str) -> list[str]:
        place, _, start = word.rstrip("/").rpartition("/")
        try:
            here = bool(start) and (not place or storage.normalise(place) == prefix)
        except InputError:  # several words, of which one is a URL
            here = False
        return [d for d, own in names.items() if word in own or (here and d.startswith(start))]

    known = [*apart.values(), *sorted({name.rpartition("-")[0] for name in names})]
    found = [list(each_named(text, called, "step or output", known)) for text in given]
    if not all(found):
        raise InputError("--keep: expected steps or outputs, found an empty text")
    return frozenset(directory for directories in found for directory in directories)


def _called(item: Garbage, nodes: list[Node]) -> str:
    """What a whole output was called, and what differs in it from such a step of these graphs."""
    try:
        found = load(item.url) if item.whole else None
    except PonenteError:
        found = None
    if found is None:
        return ""
    alike = [n for n in nodes if n.step.name == found.step]
    lines = min((difference(n.identity.config, found.config) for n in alike), key=len, default=[])
    more = [f"and {len(lines) - FEW} more"] if len(lines) > FEW else []
    return f"{found.label}{': ' if lines else ''}{'; '.join([*lines[:FEW], *more])}; "


def adopt(context: Context) -> int:
    """Publish an existing output under a step's key, recorded as adopted; --undo removes it."""
    node, store = context.step(), context.store
    if context.options.undo:
        removed, built = reference.undo(store, node)
        for path in removed:
            say(f"removed {path}")
        for path in built:
            say(f"warning: {path} was built from a removed output; build it again with --force")
        return 0
    seen = read_state(topological([node]), store)
    source = reference.choose(store, node, seen, context.options.source)
    say(f"{node.label}: {source.path}")
    for line in source.differences:
        say(f"  ignored difference: {line}")
    if not context.options.source:
        confirm(context, f"adopt {source.path} as {node.label}")
    found = reference.adopt(store, node, seen, source)
    undo = f"; undo with adopt {shlex.quote(node.label)} --undo" if found.elsewhere else ""
    say(f"{node.label}: adopted {source.path}{undo}")
    return 0


def unlock(context: Context) -> int:
    node = context.step()
    owner = lease.end(context.store.path(node))
    say(f"{node.label}: {f'released, was held by {owner}' if owner else 'the lease is free'}")
    return 0


def confirm(context: Context, question: str) -> None:
    """Ask on the terminal. Raises `InputError` if the answer is no or stdin is no terminal."""
    if context.options.yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question}? pass --yes to confirm, as there is no terminal to ask on")
    if input(f"{question}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise InputError("not confirmed; nothing was changed")


def doctor(context: Context) -> int:
    """Check what runs depend on: Python, packages, devices, store, Ray."""
    from pipeline.doctor import examine, lines

    findings = examine(context.store.prefix)
    if context.options.json:
        say_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        say("\n".join(lines(findings)))
    return 1 if any(finding.status == "fail" for finding in findings) else 0
