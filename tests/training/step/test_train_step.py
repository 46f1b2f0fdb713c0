"""The train step: exact accumulation, the same numbers on any mesh, and nothing applied blindly."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models.named as hax
from data.chat.encoder import Encoded
from data.chat.rows import pack_rows
from tests.bench.layouts import LAYOUTS, fields
from tests.training import tiny
from training.config import SPLIT_TABLES, AxisRules, Parallelism
from training.step.train_step import Boundaries, LossFunction

SPLIT = Parallelism(sharding="fsdp", group=2, sequence=2, rules=SPLIT_TABLES)
ZERO1 = tiny.split(2, "zero1")
EACH = dataclasses.replace(ZERO1, reduce="microbatch")
TENSOR = Parallelism(sharding="zero1", tensor=2)
ONLY_MOMENTS = dataclasses.replace(
    ZERO1, rules=AxisRules(params=(), optimizer_state=(("embed", ("fsdp",)),))
)


def run(program, batches):
    """Final state and the metrics of every step, from a new state."""
    state, rows = program.init(), []
    for batch in batches:
        state, metrics = program.step(state, program.layout.place(batch, tiny.BATCH))
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows


@pytest.mark.slow
def test_losses_and_gradient_norm_are_those_of_the_mean_loss():
    """Loss and gradient norm equal autodiff of the plain mean over the counted predictions."""
    program = tiny.program(masked=True)
    tokens = tiny.random_tokens(0)
    mask = (np.random.default_rng(1).random(tokens.shape) < 0.6).astype(np.float32)
    model = program.init().model

    def mean(model):
        named = hax.named(jnp.asarray(tokens), ("batch", "position"))
        log_p = jax.nn.log_softmax(model.logits(named).array, axis=-1)
        picked = jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked * mask[:, :-1]) / mask[:, :-1].sum()

    loss, gradient = jax.jit(jax.value_and_grad(mean))(model)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradient)))
    _, rows = run(program, [tiny.stored(tokens, mask)])
    assert rows[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert rows[0]["tokens"] == mask[:, :-1].sum()


@pytest.mark.slow
def test_accumulation_is_exact_under_unequal_masks():
    """Four microbatches that count unequal tokens give the gradient of one batch to 1e-6."""
    tokens = tiny.random_tokens(3)
    # Row r goes to microbatch r % 4; the microbatches count about 1, 10, 20 and 31 tokens a row.
    keep = np.array([1, 10, 20, 31])[np.arange(tiny.BATCH) % 4]
    tokens = jnp.asarray(tiny.stored(tokens, np.arange(tiny.LENGTH) < keep[:, None]))
    model = tiny.program().init().model
    results = []
    for count in (1, 4):
        config = dataclasses.replace(tiny.TRAIN, microbatches=count, z_loss=1e-2, loss_chunks=1)
        boundaries = Boundaries(eos_id=EOS, masked_from=tiny.VOCAB)
        loss = LossFunction(config, tiny.program().layout, "reference", boundaries)
        results.append(jax.jit(loss.gradients)(model, tokens))
    (one, one_gradient), (four, four_gradient) = results
    assert float(one.tokens) == float(four.tokens) == 2 * (1 + 10 + 20 + 31)
    assert float(four.nll) == pytest.approx(float(one.nll), rel=1e-6)
    assert float(four.z) == pytest.approx(float(one.z), rel=1e-6)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(one_gradient))
    for a, b in zip(jax.tree.leaves(one_gradient), jax.tree.leaves(four_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * largest)


MESHES = {
    # Those of two devices are in the one that has all three axes.
    **{
        name: (8, {"parallel": Parallelism(**fields(name))})
        for name in LAYOUTS
        if name not in ("tensor2", "sequence2")
    },
    "data2-fsdp2-micro2": (4, {"parallel": tiny.split(2), "microbatches": 2}),
    "data2-zero1-2-micro2-each": (4, {"parallel": EACH, "microbatches": 2}),
    "documents-micro2": (4, {"parallel": ZERO1, "microbatches": 2, "separate_documents": True}),
    "replicated-micro2": (4, {"parallel": Parallelism(sharding="replicated"), "microbatches": 2}),
    "zero1-tensor2": (4, {"parallel": TENSOR, "remat": "matmuls"}),
    "split-tables-sequence2": (8, {"parallel": SPLIT, "loss_chunks": 2, "microbatches": 2}),
    "only-moments-split": (4, {"parallel": ONLY_MOMENTS}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "changes"), MESHES.values(), ids=MESHES)
def test_a_mesh_computes_what_one_device_does(devices, changes):
    """The first step's gradient, which its moments hold, to 1e-5 of each array's largest; six
    losses to 1e-5."""
    assert_same_on_a_mesh(devices, changes, tiny.FOUR_WAYS)


def assert_same_on_a_mesh(devices, changes, model):
    batches = [tiny.random_tokens(i) for i in range(6)]
    runs = []
    documents = changes.get("separate_documents", False)
    for program in (
        tiny.program(model=model, separate_documents=documents),
        tiny.program(devices, model=model, **changes),
    ):
        state, _ = run(program, batches[:1])
        gradients = jax.tree.map(np.asarray, state.optimizer_state[1].mu)
        runs.append((gradients, [row["loss"] for row in run(program, batches)[1]]))
        assert program.step._cache_size() == 1
    (gradients, losses), (wanted, one) = reversed(runs)
    np.testing.assert_allclose(losses, one, rtol=0, atol=1e-5)
    for found, want in zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True):
        # A factor's gradient is one sum over all tokens and features, most of which cancels.
        limit = 1e-4 if want.ndim == 1 and len(want) == model.layers else 1e-5
        np.testing.assert_allclose(found, want, rtol=0, atol=limit * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_float32_are_float32_on_every_platform(dtype):
    """Every product of a step in float32 says so, also in the backward pass."""
    text = tiny.program(compute_dtype=dtype).lower().as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    exact = [line for line in products if "precision = [HIGHEST, HIGHEST]" in line]
    assert len(products) > 20
    assert exact == (products if dtype == "float32" else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1-tensor2", "data2-fsdp2-micro2", "split-tables-sequence2"])
def test_a_bfloat16_step_runs_on_every_layout(name):
    """A CPU's compiler aborts the process at a sum over devices in bfloat16."""
    devices, changes = MESHES[name]
    batches = [tiny.random_tokens(i) for i in range(2)]
    one, several = (
        run(tiny.program(n, model=tiny.FOUR_WAYS, compute_dtype="bfloat16", **more), batches)[1]
        for n, more in ((1, {}), (devices, changes))
    )
    losses = [[row["loss"] for row in rows] for rows in (one, several)]
    np.testing.assert_allclose(*losses, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_moments_may_be_split_where_parameters_are_not():
    """Each has rules of its own: here parameters are whole on every device, moments are halves."""
    state = tiny.program(4, parallel=ONLY_MOMENTS).init()
    for tree, share in ((state.model, 1), (state.optimizer_state[1].mu, 2)):
        query = tree.blocks.stacked.attention.query.matrix.array
        assert {shard.data.size for shard in query.addressable_shards} == {query.size // share}


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_state():
    """In bfloat16 the losses stay close to float32's and every stored array is float32."""
    batches = [tiny.random_tokens(i) for i in range(3)]
    state, rows = run(tiny.program(compute_dtype="bfloat16"), batches)
    _, reference = run(tiny.program(), batches)
    np.testing.assert_allclose(
        [row["loss"] for row in rows], [row["loss"] for row in reference], rtol=2e-2
    )
    assert {x.dtype.name for x in jax.tree.leaves(state.model)} == {"float32"}


@pytest.mark.slow
def test_non_finite_step_changes_nothing_but_the_counts():
    """A step with a NaN gradient leaves parameters and moments alone; the next one is as usual."""
    program = tiny.program()
    good = tiny.random_tokens(0)
    state, _ = run(program, [good])
    before = jax.tree.map(np.array, state)
    spoiled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.model)
    tokens = program.layout.place(good, tiny.BATCH)
    state, metrics = program.step(dataclasses.replace(state, model=spoiled), tokens)
    assert np.isnan(metrics["loss"])
    assert (int(state.step), int(state.skipped), float(metrics["skipped"])) == (2, 1, 1.0)
    assert tiny.equal(before.optimizer_state, state.optimizer_state)
    model = jax.device_put(before.model, jax.tree.map(lambda x: x.sharding, state.model))
    state, metrics = program.step(dataclasses.replace(state, model=model), tokens)
    assert np.isfinite(metrics["loss"])
    assert not tiny.equal(before.model, state.model)
    assert (int(state.step), int(state.skipped)) == (3, 1)


@pytest.mark.slow
def test_infinite_update_is_not_applied():
    """Finite gradients whose update would make parameters infinite are not applied either."""
    program = tiny.program()
    state = program.init()
    huge = jax.tree.map(lambda x: x * 1e38 * 3, state.optimizer_state[1].mu)
    huge = jax.tree.map(lambda x: jnp.full_like(x, 3e38), huge)
    adam = state.optimizer_state[1]._replace(mu=huge)
    optimizer_state = (state.optimizer_state[0], adam, state.optimizer_state[2])
    state = dataclasses.replace(state, optimizer_state=optimizer_state)
    before = jax.tree.map(np.array, state.model)
    tokens = program.layout.place(tiny.random_tokens(0), tiny.BATCH)
    state, metrics = program.step(state, tokens)
    assert np.isfinite(metrics["grad_norm"])
    assert int(state.skipped) == 1
    assert tiny.equal(before, state.model)


def test_learning_rate_metric_follows_the_step():
    """The rate of a step is that of its number, warmup first."""
    _, rows = run(tiny.program(), [tiny.random_tokens(i) for i in range(3)])
    np.testing.assert_allclose([row["learning_rate"] for row in rows[:2]], [5e-3, 1e-2], rtol=1e-6)
    assert rows[2]["learning_rate"] < 1e-2


@pytest.mark.slow
def test_optimizer_state_in_the_hosts_memory_changes_nothing():
    """Bit for bit the same parameters and moments, which are in pinned memory between steps."""
    ends = {}
    for place in ("device", "host"):
        parallel = Parallelism(sharding="zero1", optimizer_memory=place)
        program = tiny.program(2, parallel=parallel)
        state, _ = run(program, [tiny.random_tokens(seed) for seed in range(3)])
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer_state) if x.ndim}
        assert kinds == {"device" if place == "device" else "pinned_host"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.model)} == {"device"}
        ends[place] = jax.tree.map(np.asarray, (state.model, state.optimizer_state))
    jax.tree.map(np.testing.assert_array_equal, ends["device"], ends["host"])


EOS = tiny.EOS
ROWS = st.lists(st.integers(0, 3), min_size=16, max_size=16)  # one shape, compiled once


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_segments_begin_at_every_eos(row):
    """The segment of a token is the number of EOS up to and with it, counted in plain Python."""
    found = Boundaries(eos_id=EOS, separate=True).segments(jnp.asarray([row], jnp.int32))
    assert found is not None
    assert found.array[0].tolist() == [row[: i + 1].count(EOS) for i in range(len(row))]
    assert Boundaries(eos_id=EOS).segments(jnp.asarray([row], jnp.int32)) is None


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_padding_is_eos_after_eos_and_does_not_count(row):
    """A prediction counts unless it is of an EOS made at an EOS; without padding all count."""
    tokens = jnp.asarray([row], jnp.int32)
    found = Boundaries(eos_id=EOS, padded=True).counted(tokens)
    assert found is not None
    expected = [not (a == b == EOS) for a, b in itertools.pairwise(row)]
    assert found.array[0, :-1].tolist() == expected
    assert Boundaries(eos_id=EOS).counted(tokens) is None


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_ids_beyond_the_vocabulary_are_read_and_not_predicted(row):
    """Of a vocabulary of 2, ids 2 and 3 are 0 and 1; both rules of what counts hold together."""
    stored = jnp.asarray([row], jnp.int32)
    boundaries = Boundaries(eos_id=EOS, padded=True, masked_from=2)
    assert boundaries.tokens(stored)[0].tolist() == [i % 2 for i in row]
    found = boundaries.counted(stored)
    assert found is not None
    expected = [b < 2 and not (a == b == EOS) for a, b in itertools.pairwise(row)]
    assert found.array[0, :-1].tolist() == expected


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=16, max_size=16))
def test_ids_of_the_third_band_begin_a_segment(row):
    """Of a vocabulary of 2, ids 4 and 5 are 0 and 1 and begin one; an EOS, which is 0, does not."""
    stored = jnp.asarray([row], jnp.int32)
    boundaries = Boundaries(eos_id=EOS, separate=True, masked_from=2, begins=True)
    assert boundaries.tokens(stored)[0].tolist() == [i % 2 for i in row]
    found, counted = boundaries.segments(stored), boundaries.counted(stored)
    assert found is not None
    assert counted is not None
    assert found.array[0].tolist() == [sum(i >= 4 for i in row[: n + 1]) for n in range(len(row))]
    assert counted.array[0, :-1].tolist() == [i < 2 for i in row[1:]]


def loss_of(tokens, *, separate=False, padded=False, **more):
    """Summed nll and count of int32 [batch, position] under the tiny model."""
    boundaries = Boundaries(eos_id=EOS, separate=separate, padded=padded, **more)
    config = dataclasses.replace(tiny.TRAIN, loss_chunks=1)
    function = LossFunction(config, tiny.program().layout, "reference", boundaries)
    _, sums = jax.jit(function)(tiny.program().init().model, tokens)
    return float(sums.nll), float(sums.tokens)


def documents(seed, lengths):
    """Documents of random ids, none of them EOS."""
    ids = np.random.default_rng(seed)
    return [ids.integers(1, tiny.VOCAB, n).tolist() for n in lengths]


def alone(tokens):
    """nll of every prediction of one sequence by itself, float64 [position - 1]."""
    # What follows the sequence is not seen by it; one length is compiled once.
    row = np.pad(np.array(tokens, np.int32), (0, tiny.LENGTH - len(tokens)), constant_values=1)
    logits = np.asarray(_logits(jnp.asarray(row[None])), np.float64)[0, : len(tokens)]
    log_z = np.log(np.exp(logits).sum(axis=-1))
    return log_z[:-1] - logits[np.arange(len(tokens) - 1), tokens[1:]]


def _logits(tokens):
    rows = hax.named(tokens, ("batch", "position"))
    return jax.jit(lambda model: model.logits(rows).array)(tiny.program().init().model)


@pytest.mark.slow
def test_separate_documents_score_as_they_do_alone():
    """The loss of a row is that of its documents one by one, each behind its own EOS."""
    first, second, third = documents(0, (9, 13, 7))
    row = [*first, EOS, *second, EOS, *third]
    expected = alone([*first, EOS]).sum()
    expected += alone([EOS, *second, EOS]).sum() + alone([EOS, *third]).sum()
    tokens = jnp.asarray([row] * tiny.BATCH, jnp.int32)
    nll, count = loss_of(tokens, separate=True)
    assert count == tiny.BATCH * (len(row) - 1)
    assert nll == pytest.approx(tiny.BATCH * expected, rel=1e-5)
    joined, _ = loss_of(tokens)
    assert joined != pytest.approx(nll, rel=1e-4), "attention must reach across when asked to"


@pytest.mark.slow
def test_conversations_of_a_row_score_as_they_do_alone():
    """Packed rows of two, with an EOS inside a turn, and padding; only replies are predicted."""
    first, second = documents(2, (12, 14))
    first[5] = EOS
    masks = [np.arange(len(d)) % 3 > 0 for d in (first, second)]
    chats = [Encoded(np.array(d), m) for d, m in zip((first, second), masks, strict=True)]
    (row,) = pack_rows(chats, tiny.LENGTH, tiny.VOCAB)
    expected = sum(alone(d)[m[1:]].sum() for d, m in zip((first, second), masks, strict=True))
    rows = jnp.asarray([row] * tiny.BATCH, jnp.int32)
    nll, count = loss_of(rows, separate=True, masked_from=tiny.VOCAB, begins=True)
    assert count == tiny.BATCH * sum(m[1:].sum() for m in masks)
    assert nll == pytest.approx(tiny.BATCH * expected, rel=1e-5)
    joined, _ = loss_of(rows, masked_from=tiny.VOCAB, begins=True)
    assert joined != pytest.approx(nll, rel=1e-4)


@pytest.mark.slow
def test_a_padded_row_scores_as_its_documents():
    """Padding adds nothing to the sum and nothing to the count, and no gradient."""
    first, second = documents(1, (8, 10))
    row = [*first, EOS, *second, EOS]
    padded = row + [EOS] * (tiny.LENGTH - len(row))
    nll, count = loss_of(jnp.asarray([padded] * tiny.BATCH, jnp.int32), separate=True, padded=True)
    plain, plain_count = loss_of(jnp.asarray([row] * tiny.BATCH, jnp.int32), separate=True)
    assert (nll, count) == (pytest.approx(plain, rel=1e-6), plain_count)


@pytest.mark.slow
def test_the_switch_reaches_the_compiled_step():
    """`separate_documents` changes the loss of a step on rows with several documents."""
    tokens = tiny.random_tokens(5)
    tokens[:, 11::7] = EOS
    losses = {}
    for separate in (False, True):
        program = tiny.program(separate_documents=separate)
        placed = program.layout.place(tokens, tiny.BATCH)
        losses[separate] = float(program.step(program.init(), placed)[1]["loss"])
    assert losses[True] == pytest.approx(
        loss_of(jnp.asarray(tokens), separate=True)[0] / tokens[:, 1:].size, rel=1e-5
    )
    assert losses[True] != pytest.approx(losses[False], rel=1e-4)
    assert dataclasses.replace(tiny.TRAIN, separate_documents=True) != tiny.TRAIN
