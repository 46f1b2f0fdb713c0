"""Rewound batches are those that the trainer was fed, and documents those of the sources."""

from __future__ import annotations

import collections
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import steps
from data.batches.dataset import Dataset
from data.batches.loader import Loader
from models.jax_numerics import fixed_numerics
from pipeline import select
from pipeline.errors import InputError, StepFailed
from pipeline.graph.step import as_node
from steps.checkpoints.load import load
from steps.cli import rewind as verb
from steps.cli import trace_document as trace_verb
from steps.pages.compare import record_named
from steps.rewind.batch import Rewinder
from steps.rewind.run import open_run
from steps.rewind.sights import trace
from steps.training.plan.declared_run import declared_run
from tests.pipeline.helpers import ledgers
from tests.steps.built import built
from tests.steps.rewind import kinds
from tests.steps.rewind.directly import EOS, VOCAB, direct, expected_ids
from training.config.batch_schedule import read_by

pytestmark = pytest.mark.slow
KINDS = (
    *("lines", "groups", "mapped", "prepared", "integers", "chats", "packed", "mix"),
    *("scheduled", "extended", "warm"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By kind, a run's directory and the batches that its trainer was fed."""
    root = tmp_path_factory.mktemp("kinds")
    nodes, data = kinds.trainings(root)
    assert set(nodes) == set(KINDS)
    found = {kind: kinds.fed(root / "store", node) for kind, node in nodes.items()}
    return {**found, "nodes": nodes, "data": data, "store": root / "store"}


def _of(runs):
    return [(kind, runs[kind]) for kind in KINDS]


@pytest.fixture(scope="module")
def rewound(runs):
    """By kind, the open rewinder of the run."""
    found = {kind: Rewinder(open_run(output.path)) for kind, (output, _) in _of(runs)}
    yield found
    for each in found.values():
        each.dataset.close()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_what_the_trainer_was_fed(runs, rewound, kind):
    """Of every step, those of an extended run before it began included."""
    fed = runs[kind][1]
    if kind == "extended":
        assert rewound[kind].run.began == 8
        fed = [*runs["lines"][1][:8], *fed]
    assert len(fed) == rewound[kind].run.train.steps
    for step, batch in enumerate(fed, 1):
        assert np.array_equal(rewound[kind].stored_ids(step), batch)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("kind", ["scheduled", "mix"])
def test_batches_do_not_depend_on_the_number_of_hosts(rewound, kind, processes):
    """Each process of a pod reads its own rows with the training's loader."""
    rewinder = rewound[kind]
    for step in (1, 4, 8, 10):
        phase, _ = read_by(rewinder.run.train, step)
        parts = []
        for rows in np.split(np.arange(phase.rows * phase.pieces), processes):
            with (
                Dataset(rewinder.spec) as dataset,
                Loader(
                    dataset,
                    batch_size=phase.rows,
                    rows=phase.read_rows(rows),
                    start_batch=step - 1 - phase.first,
                    first=phase.data_offset,
                    threads=1,
                    prefetch_batches=1,
                ) as loader,
            ):
                parts.append(phase.cut(next(loader), rows))
        assert np.array_equal(np.concatenate(parts), rewinder.stored_ids(step))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_tokens_of_their_documents(rewound, kind):
    """Read from the source at the place that is given; what no document has is EOS."""
    rewinder = rewound[kind]
    for step in (1, 7, 10):
        ids = rewinder.stored_ids(step)
        batch = rewinder.batch(step, losses=False)
        assert [row.row for row in batch.rows] == list(range(len(ids)))
        for row, stored in zip(batch.rows, ids % VOCAB, strict=True):
            left = np.ones(len(stored), bool)
            for each in row.documents:
                left[each.first : each.first + each.tokens] = False
                found = stored[each.first : each.first + each.tokens].tolist()
                wanted = expected_ids(each.origin, rewinder)
                if wanted is None:
                    words = bytes(i for i in found if i < EOS).decode(errors="replace")
                    assert "".join(each.text.split())[:20] in "".join(words.split())
                    assert "nstruction" in words or each.after or "esponse" in words
                    continue
                wanted = [*wanted, *[0] * (len(found) if kind == "integers" else 0)]
                assert found == wanted[each.after : each.after + each.tokens]
            padding = {"chats": 0}.get(kind, EOS)
            assert (stored[left] == padding).all()
            if kind not in ("packed", "chats"):
                assert not left.any()


@pytest.mark.parametrize("kind", KINDS)
def test_trace_finds_every_row_that_shows_a_document(rewound, kind):
    """By brute force over all batches of the run, by id, by the row of its file, and by words."""
    rewinder = rewound[kind]
    shown = collections.defaultdict(list)
    for step in range(1, rewinder.run.train.steps + 1):
        for row in rewinder.batch(step, losses=False).rows:
            for each in row.documents:
                key = each.origin.id, each.origin.file, each.origin.row
                shown[key].append((step, row.row, each.first, each.tokens, row.epoch))
    for own, file, row in list(shown)[::9]:
        names = [f"{file}:{row}", *([own] if own is not None else [])]
        for name in names:
            for origin, sights in trace(rewinder, name):
                found = [(s.step, s.row, s.first, s.tokens, s.epoch) for s in sights]
                assert sorted(found) == shown.get((origin.id, origin.file, origin.row), [])
            assert (own, file, row) in [(o.id, o.file, o.row) for o, _ in trace(rewinder, name)]


def test_trace_by_words_of_the_text(rewound):
    for kind in ("lines", "packed"):
        ((origin, _),) = trace(rewound[kind], "document 47: ")
        assert origin.id == "doc-47"
    with pytest.raises(InputError, match="none of its training documents is 'no such words'"):
        list(trace(rewound["lines"], "no such words"))


@pytest.mark.parametrize("kind", ["lines", "packed", "chats", "integers"])
def test_losses_are_those_of_a_direct_evaluation(runs, rewound, kind):
    """Row by row, from logits in float64 of each document by itself, within 1e-5."""
    with fixed_numerics():
        output, model = runs[kind][0], None
        batch = rewound[kind].batch(10)
        assert batch.checkpoint == 8
        model = load(output.at(8))
        for row, ids in zip(batch.rows, rewound[kind].stored_ids(10), strict=True):
            nll, counted = direct(model, ids, kind)
            assert row.counted == counted
            assert row.loss == pytest.approx(nll / counted, abs=1e-5)


@pytest.mark.parametrize("kind", ["lines", "packed", "chats", "mix", "scheduled", "extended"])
def test_the_loss_after_a_checkpoint_is_the_one_of_training(runs, rewound, kind):
    """No update lies between the checkpoint of step 8 and the loss of step 9."""
    batch = rewound[kind].batch(9)
    trained = {row["step"]: row["loss"] for row in record_named(runs[kind][0].path).history}
    assert batch.checkpoint == 8
    assert batch.loss == pytest.approx(trained[9], abs=1e-5)


def test_steps_without_a_checkpoint_have_no_losses(rewound):
    """Step 4 and those before have none; a new run begins with the model that it took."""
    assert rewound["lines"].batch(4).checkpoint is None
    assert rewound["lines"].batch(4).rows[0].loss is None
    assert rewound["warm"].batch(1).checkpoint == 0
    with pytest.raises(InputError, match="a step from 1 to 10, found 11"):
        rewound["lines"].batch(11)


@pytest.fixture
def copied(runs, tmp_path):
    """A copy of the store of all kinds, to damage."""
    store = runs["lines"][0].path.rpartition("/")[0]
    shutil.copytree(store, tmp_path / "store")
    return lambda kind: f"{tmp_path}/store/{runs[kind][0].path.rpartition('/')[2]}"


def test_an_unfinished_run_is_rewound_from_what_it_recorded_at_its_start(rewound, copied):
    """Without a manifest there is the record of its data, and checkpoints in its ledger."""
    path = copied("mix")
    Path(path, "manifest.json").unlink()
    with Rewinder(open_run(path)) as rewinder:
        assert np.array_equal(rewinder.stored_ids(7), rewound["mix"].stored_ids(7))
        assert rewinder.batch(9).loss == pytest.approx(rewound["mix"].batch(9).loss, abs=1e-6)
    with pytest.raises(InputError, match="found none"):
        open_run(f"{path}-not")


@pytest.mark.parametrize("known", [True, False])
def test_an_unfinished_run_knows_what_it_continues(runs, rewound, copied, capsys, known):
    """With the run that it extends and its steps; one that an older version began has its own."""
    paths = {kind: copied(kind) for kind in ("extended", "warm")}
    for path in paths.values():
        Path(path, "manifest.json").unlink()
        (ledger,) = ledgers(path)
        record = Path(path, ledger.find("about").root, "about.json")
        about = json.loads(record.read_text())
        assert "/" not in about["continued"]["path"]  # a store can be moved
        if not known:
            del about["continued"]
            record.write_text(json.dumps(about))
    with Rewinder(open_run(paths["extended"])) as rewinder:
        for step, batch in enumerate(runs["extended"][1], 9):
            assert np.array_equal(rewinder.stored_ids(step), batch)
        parent = copied("lines")
        assert rewinder.run.that_did(8).path == (parent if known else paths["extended"])
        assert rewinder.batch(9).checkpoint == (8 if known else None)
        if known:
            loss = rewound["extended"].batch(9).loss
            assert rewinder.batch(9).loss == pytest.approx(loss, abs=1e-6)
    with Rewinder(open_run(paths["warm"])) as rewinder:
        assert rewinder.batch(1).checkpoint == (0 if known else None)
    Path(paths["extended"], "ids.txt").write_text("doc-1\n")
    asked = [paths["extended"], "9", "--json", "--without", f"{paths['extended']}/ids.txt"]
    if known:
        assert verb.run(asked) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["at"], said["from"]) == (8, parent)
    else:
        with pytest.raises(InputError, match="no checkpoint before step 9"):
            verb.run(asked)


def test_a_resumed_run_is_rewound(runs, rewound, copied):
    """Steps after the checkpoint of another attempt are what that attempt would have read."""
    path = copied("packed")
    Path(path, "manifest.json").unlink()
    (ledger,) = ledgers(path)
    for name in ("checkpoint/00000008", "checkpoint/00000010", "record"):
        Path(ledger.record(name)).unlink()
    _, fed = kinds.fed(path.rpartition("/")[0], runs["nodes"]["packed"])
    assert len(fed) == 6
    for step, batch in zip(range(5, 11), fed, strict=True):
        assert np.array_equal(rewound["packed"].stored_ids(step), batch)


def test_what_is_gone_is_said(rewound, copied, tmp_path):
    """Without the documents there is the batch and its text; a changed source is named."""
    path = copied("lines")
    rewinder = Rewinder(open_run(path))
    documents = rewinder.parts[0].cache.input_paths["documents"]
    shutil.rmtree(documents)
    (first, *_), expected = rewinder.batch(3, losses=False).rows, rewound["lines"].batch(3)
    assert first.documents[0].text == expected.rows[0].documents[0].text
    assert first.documents[0].origin.id is None
    assert "are gone" in first.documents[0].origin.why
    with pytest.raises(InputError, match="build them again"):
        list(trace(rewinder, "doc-1"))


def test_an_extended_run_without_documents_begins_at_a_checkpoint_of_the_one_before(
    runs, rewound, capsys, tmp_path
):
    """By the printed declaration: no batch that is fed has the document, and the rest is equal."""
    own = rewound["extended"].batch(11, losses=False).rows[0].documents[0].origin.id
    (tmp_path / "ids.txt").write_text(f"{own}\n")
    asked = [runs["extended"][0].path, "10", "--without", str(tmp_path / "ids.txt")]
    assert verb.run(asked) == 0
    assert f"`before` is {runs['lines'][0].path}" in capsys.readouterr().out
    assert verb.run([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["at"], said["start"], said["end"]) == (8, 64, 112)
    assert said["from"] == runs["lines"][0].path
    names = {"steps": steps, "sequences": runs["data"]["lines"], "before": runs["nodes"]["lines"]}
    names |= {"trained": runs["nodes"]["extended"], "optimizer": kinds.OPTIMIZER}
    exec(said["declaration"], {**names, "train": runs["extended"][0].train}, made := {})
    again, fed = kinds.fed(runs["store"], made["again"])
    assert len(fed) == 6
    with Rewinder(open_run(again.path)) as rewinder:
        for step, batch, first in zip(range(9, 15), fed, runs["extended"][1], strict=True):
            assert np.array_equal(rewinder.stored_ids(step), batch)
            shown = [
                own in [each.origin.id for each in row.documents]
                for row in rewound["extended"].batch(step, losses=False).rows
            ]
            assert ((batch != first).any(axis=1) == shown).all()
            rows = rewinder.batch(step, losses=False).rows
            assert own not in [each.origin.id for row in rows for each in row.documents]
        (other,) = {rows[0].documents[0].origin.id}  # of the last step

    # And a second time, from the same checkpoint: both are left out.
    (tmp_path / "ids.txt").write_text(f"{other}\n")
    asked = [again.path, "10", "--without", str(tmp_path / "ids.txt"), "--json"]
    assert verb.run(asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["at"], said["from"]) == (8, runs["lines"][0].path)
    names |= {"sequences": made["without"], "trained": made["again"]}
    exec(said["declaration"], {**names, "train": runs["extended"][0].train}, made := {})
    twice = built(runs["store"], made["again"], steps.Checkpoint)
    with Rewinder(open_run(twice.path)) as rewinder:
        for step in range(9, 15):
            rows = rewinder.batch(step, losses=False).rows
            shown = {each.origin.id for row in rows for each in row.documents}
            assert not shown & {own, other}
    plans = [declared_run(as_node(n), {}) for n in (runs["nodes"]["extended"], made["again"])]
    assert plans[0].epochs == plans[1].epochs != ()


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 0.0)])
def test_a_part_of_a_mixture_is_replaced_by_the_same_part_while_it_is_read(runs, rewound, weights):
    """By the first positions after the end that read it, and after those by any that are clean."""
    rows = rewound["mix"].batch(2, losses=False).rows  # positions 8 to 15
    named = {row.part: (d.origin.file, d.origin.row) for row in rows for d in row.documents}
    assert len(named) == 2
    sequences = (runs["data"]["lines"], runs["data"]["groups"])
    later = (steps.Phase(start_tokens=20 * kinds.LENGTH, weights=weights),)
    mix = steps.mix(sequences, weights=(1.0, 2.0), later=later)
    names = tuple(f"{file}:{row}" for file, row in named.values())
    node = steps.without(mix, documents=names, start=4, end=24)
    moved = dict(built(runs["store"], node, steps.Sequences).dataset().moved)

    shown = [
        8 * (step - 1) + row.row
        for step in range(1, 11)  # the run reads every row of both
        for row in rewound["mix"].batch(step, losses=False).rows
        if {(d.origin.file, d.origin.row) for d in row.documents} & set(named.values())
    ]
    bad = rewound["mix"].dataset.rows(np.array(shown))
    with Dataset(built(runs["store"], mix, steps.Sequences).dataset()) as order:
        positions = np.arange(400)
        of, clean = order.origins(positions)[0], ~np.isin(order.rows(positions), bad)
    expected, left = {}, 24
    for source, weight in enumerate(weights):
        mine = [p for p in range(4, 24) if not clean[p] and of[p] == source]
        assert mine
        free = [p for p in range(left, 400) if clean[p] and (of[p] == source or not weight)]
        expected |= dict(zip(mine, free, strict=False))
        left = 24 if weights[-1] else max(expected.values()) + 1
    assert moved == expected
    with pytest.raises(StepFailed, match="leaves documents out of one order; mix first"):
        built(runs["store"], steps.mix((node, sequences[0]), weights=(1.0, 1.0)), steps.Sequences)
    trained = steps.train(node, kinds.MODEL, kinds.OPTIMIZER, kinds.TRAIN)
    assert len(declared_run(as_node(trained), {}).epochs) == 2
    with pytest.raises(StepFailed, match=r"10 steps read 80 sequences.*give `without` end=80"):
        built(runs["store"], trained, steps.Checkpoint)


@pytest.mark.parametrize("selected", [False, True])
def test_the_command_that_a_report_shows_writes_its_page(runs, monkeypatch, capsys, selected):
    """Where it is linked; by the run's name in the store, of a selection by the chosen run's."""
    nodes = tuple(runs["nodes"][kind] for kind in ("packed", "mix"))
    model = select(nodes, by="last.loss") if selected else nodes[0]
    page = Path(built(runs["store"], steps.report(model), steps.Report).shard("page"))
    shown = re.findall(r'"clicked":\["(.*?)","(.*?)"\]', (page / "index.html").read_text())
    ((command, link),) = shown
    monkeypatch.chdir(runs["store"].parent)
    monkeypatch.setenv("PONENTE_PREFIX", f"./{runs['store'].name}")
    step = "9" if selected else "10"
    asked, written = command.replace("STEP", step).split(), page / link.replace("STEP", step)
    assert asked[:2] == ["ponente", "rewind"]
    assert not written.exists()
    assert verb.run([*asked[2:], "--no-loss"]) == 0
    assert capsys.readouterr().out.startswith(f"step {step}: 8 rows")
    assert written.exists()
    with pytest.raises(InputError, match=rf"{runs['store']}/train-not: .*found none"):
        trace_verb.run(["doc-1", "train-not"])


def test_the_verbs(runs, capsys, tmp_path):
    """Text of at most 100 columns, one JSON object a step, and a page without other resources."""
    path, page = runs["packed"][0].path, tmp_path / "page.html"
    assert verb.run([path, "9..10", "--page", str(page)]) == 0
    text = capsys.readouterr().out.splitlines()
    assert max(map(len, text[:-1])) <= 100
    assert text[0].startswith("step 9: 8 rows of 32 tokens, loss 5.")
    assert "under the checkpoint of step 8" in text[0]
    written = page.read_text()
    assert "doc-" in written
    assert "part-0.jsonl:" in written
    assert "http" not in written.replace("http://www.w3.org", "")
    assert verb.run([path, "9..10", "--no-loss", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["step"] for each in found] == [9, 10]
    assert found[0]["rows"][0]["loss"] is None
    own = found[0]["rows"][0]["documents"][0]["origin"]["id"]
    assert trace_verb.run([own, path, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)["seen"]
    assert 9 in [each["step"] for each in seen]
    assert verb.run([path, "--spikes"]) == 0
    for wrong in (["1", "--spikes"], [], ["2..1"], ["x"], ["0"]):
        with pytest.raises(InputError):
            verb.run([path, *wrong])
