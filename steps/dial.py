"""The dial: one number gives a whole recipe, its hours, dollars and loss. Nothing is compiled.

The shapes are nanochat's depths and those between them: a width of 128 k has depths 2 k - 3 to
2 k + 2. The one whose own run is nearest to what is asked is taken; the MLP's width (for
parameters) or the number of steps (for tokens, dollars and loss) then takes up the rest.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pipeline import Hardware, InputError, pod
from pipeline.prices import price_of
from steps.platforms import chip_of
from steps.training.plan.cost import ends, run_time
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.memory import fits, step_on
from training.cost.resolved_run import ResolvedPhase
from training.cost.step_time import forecast
from training.recipes.curves import MARIN, NANOCHAT
from training.recipes.nanochat import nanochat
from training.recipes.recipe import Recipe

SHAPES = [(depth, 128 * k) for k in range(1, 33) for depth in range(max(1, 2 * k - 3), 2 * k + 3)]
NAMES = ("depth", "parameters", "tokens", "dollars", "loss")
LOSSES = (0.1, 100.0)  # nats per token, for which the curve has FLOPs that a float holds
Make = partial[Recipe]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DialledRecipe(Recipe):
    """A recipe with its forecasts; dollars are on demand, None without a price of the chip.

    The loss is in nats per token of `training.recipes.curves.NANOCHAT`'s data; intervals have 80 %.
    """

    hardware: str
    parameters: int
    hours: float
    hours_range: Range
    dollars: float | None
    dollars_range: Range | None
    loss: float
    loss_range: Range
    bits_per_byte: float
    extrapolated: bool


def recipe(
    *,
    depth: int | None = None,
    parameters: float | None = None,
    tokens: float | None = None,
    dollars: float | None = None,
    loss: float | None = None,
    hardware: str = "v6e-8",
    vocab_size: int = 32_768,
    length: int = 2048,
) -> DialledRecipe:
    """The recipe of one number: a depth, all parameters, tokens, dollars, or a loss."""
    given = zip(NAMES, (depth, parameters, tokens, dollars, loss), strict=True)
    asked = {name: value for name, value in given if value is not None}
    if len(asked) != 1:
        found = " and ".join(asked) or "none"
        raise InputError(f"recipe: expected one of {', '.join(NAMES)}; found {found}")
    ((name, value),) = asked.items()
    on, make = pod(hardware), partial(nanochat, vocab_size=vocab_size, length=length)
    if depth is not None:
        return priced(make(depth), on)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"recipe: {name}: expected a number above 0, found {value!r}")
    measure: Callable[[Recipe], float] = {
        "parameters": lambda recipe: recipe.model.parameter_count,
        "tokens": lambda recipe: recipe.tokens,
        "dollars": partial(_dollars, on=on),
        "loss": lambda recipe: recipe.flops,
    }[name]
    if loss is not None and not LOSSES[0] <= loss <= LOSSES[1]:
        raise InputError(f"recipe: loss: expected {LOSSES[0]} to {LOSSES[1]} nats, found {loss!r}")
    target = NANOCHAT.flops(value / NANOCHAT.nats) if loss is not None else value
    shapes = [partial(make, layers, width=width) for layers, width in SHAPES]
    usable = partial(_fits, on=on) if name == "dollars" else lambda recipe: True
    shaped = _nearest(shapes, measure, usable, target, name)
    own = shaped()
    if name == "parameters":
        width = own.model.embed
        more = (target - measure(own)) / (2 * own.model.layers * width)
        mlp = min(max(4 * width + 128 * round(more / 128), 2 * width), 8 * width)
        return priced(shaped(mlp=mlp), on)
    possible = range(1, 4 * own.train.steps)
    below = bisect_right(possible, target, key=lambda steps: measure(shaped(steps=steps)))
    return priced(shaped(steps=max(1, below)), on)


def _nearest(
    shapes: list[Make],
    measure: Callable[[Recipe], float],
    usable: Callable[[Recipe], bool],
    target: float,
    name: str,
) -> Make:
    """The usable shape that measures nearest to `target`, and within a factor of 2."""
    index = bisect_left(shapes, target, key=lambda make: measure(make()))
    near = sorted(
        shapes[max(index - 1, 0) : index + 1],
        key=lambda make: abs(math.log(max(measure(make()), 1e-9) / target)),
    )
    # On more than 128 chips only every other width can be split, and each has six depths.
    further = shapes[max(index - 8, 0) : max(index - 1, 0)][::-1] + shapes[index + 1 : index + 8]
    for make in (*near, *further):
        if 0.5 < measure(make()) / target < 2.0 and usable(make()):
            return make
    known = target, measure(near[0]())
    if name == "loss":  # which are measured in FLOPs
        known = tuple(NANOCHAT.loss(flops)[1] * NANOCHAT.nats for flops in known)
    raise InputError(
        f"recipe: {name}: asked for {known[0]:.4g}; no recipe that fits the hardware comes near, "
        f"and {near[0]().name} comes to {known[1]:.4g}"
    )


def _dollars(recipe: Recipe, on: Hardware) -> float:
    """Dollars of a recipe, whether or not it fits; 0 where its batch does not divide."""
    if recipe.train.batch_size % on.devices:
        return 0.0
    if (dollars := priced(recipe, on, check=False).dollars) is None:
        raise InputError(
            f"recipe: dollars: no public price of {on.generation}; give one in a file that "
            "PONENTE_PRICES names"
        )
    return dollars


def _fits(recipe: Recipe, on: Hardware) -> bool:
    return (found := _step(recipe, on)) is not None and fits(found)


def _step(recipe: Recipe, on: Hardware) -> ResolvedPhase | None:
    """The step in the fewest microbatches that fit by formula, or in the most; None without any."""
    # The number of steps does not change a step: one search serves all of them.
    return _search(replace(recipe, train=replace(recipe.train, steps=0)), on)


@functools.lru_cache(256)
def _search(recipe: Recipe, on: Hardware) -> ResolvedPhase | None:
    def found(parts: int) -> ResolvedPhase:
        train = replace(recipe.train, microbatches=parts)
        return step_on(on, recipe.model, recipe.optimizer, train)

    most, rest = divmod(recipe.train.batch_size, on.devices)
    parts = [2**i for i in range(most.bit_length()) if most % 2**i == 0]
    if rest:
        return None
    least = found(parts[-1])
    return next(filter(fits, map(found, parts))) if fits(least) else least


def priced(recipe: Recipe, on: Hardware, check: bool = True) -> DialledRecipe:
    """The recipe with its time, price and loss; without `check` also where it does not fit.

    The loss is that of nanochat's curve, whatever the recipe.
    """
    if (chip := chip_of(on)) is None:
        raise InputError(
            "recipe: hardware: expected chips whose time is predicted, such as v6e-8 or 8xh100, "
            f"found {on.name}"
        )
    found = _step(recipe, on)
    if found is None or (check and not fits(found)):
        raise InputError(
            f"recipe: hardware: {recipe.train.batch_size} sequences of {recipe.name} do not fit "
            f"{on.name} by formula, or do not divide over its chips; choose another slice"
        )
    model, optimizer, steps = recipe.model, recipe.optimizer, recipe.train.steps
    train = replace(recipe.train, microbatches=found.train.microbatches)
    run = DeclaredRun(model, optimizer, train, on, steps, 1, True, 0, train, ())
    step, price = forecast(found, chip), price_of(chip.name)
    times = [run_time(run, found.train, step, each).total for each in ends(step)]
    fast, hours, slow = (each / 3600 for each in times)
    rate = None if price is None or price.on_demand is None else price.on_demand * on.chips
    low, bits, high = NANOCHAT.loss(recipe.flops)
    marin = f"Marin's ladder has {MARIN.loss(recipe.flops)[1]:.3f} bits a byte of {MARIN.data}"
    sources = {
        "train.microbatches": "the fewest that fit the memory by formula",
        "parameters": f"all; {model.matmul_parameters:,} multiply every token",
        "tokens": "steps x batch",
        "hours": "as `plan`: start, steps, evaluations and checkpoints (docs/predictions.md)",
        "dollars": "" if price is None else f"on demand, {price.source}, {price.date}",
        "loss": f"nats per token of {NANOCHAT.data}. With as many FLOPs, {marin}",
    }
    return DialledRecipe(
        name=recipe.name,
        model=model,
        optimizer=optimizer,
        train=train,
        sources={**recipe.sources, **sources},
        hardware=on.name,
        parameters=model.parameter_count,
        hours=hours,
        hours_range=(fast, slow),
        dollars=None if rate is None else rate * hours,
        dollars_range=None if rate is None else (rate * fast, rate * slow),
        loss=bits * NANOCHAT.nats,
        loss_range=(low * NANOCHAT.nats, high * NANOCHAT.nats),
        bits_per_byte=bits,
        extrapolated=NANOCHAT.extrapolated(recipe.flops),
    )
