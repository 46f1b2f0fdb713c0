"""The board: recipes of small models ranked by validation loss, with intervals over seeds.

ponente run experiments/recipes.py              all entries of experiments/board, three seeds
ponente run experiments/recipes.py --rates      factors on the rates of each entry, one seed
ponente run experiments/recipes.py --largest    two entries at 4M parameters
ponente run experiments/recipes.py --smoke      two entries, a few steps
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import steps
from data.source import fineweb_edu, python_documentation
from experiments.board import Entry, entries, scaled
from experiments.tpuchat_130m import changed
from models.config import TransformerConfig
from models.presets import tiny, tpuchat_130m
from models.shape.footprint import footprint
from pipeline import Experiment, InputError, pod, sweep
from steps.dial import priced
from training.config import TrainConfig
from training.recipes.recipe import Recipe

SIZES: Mapping[str, TransformerConfig] = {
    # Named by the parameters in the blocks' matrices: 0.26, 0.55, 1.06 and 4.1 million.
    "0.25M": replace(tiny, tied=False, layers=5, embed=64, heads=2, kv_heads=2, mlp=192),
    "0.5M": replace(tiny, tied=False, layers=5, embed=96, heads=3, kv_heads=3, mlp=256),
    "1M": replace(tiny, tied=False, layers=5, embed=128, heads=4, kv_heads=4, mlp=384),
    "4M": replace(tiny, tied=False, layers=7, embed=224, heads=7, kv_heads=7, mlp=576),
}


def shape(size: TransformerConfig, entry: Entry) -> TransformerConfig:
    """The model of a size with the entry's changes and as many parameters in its matrices."""
    model = changed(size, entry.model)
    # Two matrices of an MLP without a gate have the parameters of three with one.
    return model if model.mlp_kind == "swiglu" else replace(model, mlp=model.mlp * 3 // 2)


def cost(name: str, entry: Entry) -> str:
    """Prediction for tpuchat's 130M in matmuls with the entry's changes, 20 tokens for each."""
    model = shape(tpuchat_130m, entry)
    steps = 20 * tpuchat_130m.matmul_parameters // (64 * 2048)
    train = changed(TrainConfig(batch_size=64, sequence_length=2048, steps=steps), entry.training)
    recipe = Recipe(name=name, model=model, optimizer=entry.optimizer, train=train, sources={})
    found = priced(recipe, pod("v6e-1"))
    price = "" if found.dollars is None else f"${found.dollars:.2f}, "
    return f"{price}{found.hours:.2f} h"


def recipes(
    source: str = fineweb_edu("sample-10BT"),
    train_tokens: int = 22_000_000,  # 20 for each parameter of the largest of three sizes
    validation_tokens: int = 200_000,
    unit: Literal["document", "row_group"] = "row_group",  # reads little more than its sample
    sizes: tuple[str, ...] = ("0.25M", "0.5M", "1M"),
    budgets: tuple[int, ...] = (10, 20),  # tokens for each parameter in the blocks' matrices
    names: tuple[str, ...] = (),  # of entries; all of them by default
    seeds: tuple[int, ...] = (0, 1, 2),
    factors: tuple[float, ...] = (1.0,),  # on all rates of an entry
    first: str = "adamw",  # with which the others are compared
    training: TrainConfig = TrainConfig(
        batch_size=32,
        microbatches=32,  # a row's logits fit a core's cache: 1.5 times as fast on a CPU
        compute_dtype="float32",
        evaluate_every=100_000,  # before the first step and after the last
        evaluate_batches="all",
        evaluate_batch_size=64,
        checkpoint_every=100_000,
        log_every=20,
    ),
    length: int = 256,
    hardware: str = "local",
) -> steps.Report:
    """The page of the board."""
    splits, on = (("validation", validation_tokens),), pod(hardware)
    documents = steps.sample(source, tokens=train_tokens, splits=splits, unit=unit)
    tokenizer = steps.train_tokenizer(documents, vocab_size=tiny.vocab_size)
    sequences = steps.block_shuffle(steps.tokenize(documents, tokenizer), length)
    known = entries()
    for kind, asked, there in (("names", names, known), ("sizes", sizes, SIZES)):
        if unknown := set(asked) - set(there):
            raise InputError(
                f"recipes.{kind}: expected some of {', '.join(there)}, found {', '.join(unknown)}"
            )
    chosen = {name: entry for name, entry in known.items() if not names or name in names}

    def run(of: tuple[str, int, str, float, int]) -> steps.Checkpoint:
        size, budget, name, factor, seed = of
        entry, model = chosen[name], shape(SIZES[size], chosen[name])
        own = changed(training, {**entry.training, "seed": seed})
        tokens = budget * footprint(SIZES[size]).block_parameters
        return steps.train(
            sequences, model, scaled(entry.optimizer, factor), own, tokens=tokens, hardware=on
        )

    of = tuple(itertools.product(sizes, budgets, chosen, factors, seeds))
    label = {(n, f): n if f == 1.0 else f"{n} x{f:g}" for n in chosen for f in factors}
    cells = tuple((label[n, f], f"{size} x {budget}", seed) for size, budget, n, f, seed in of)
    runs = sweep(
        run,
        {
            f"{name}, {size}, seed {seed}": each
            for (name, size, seed), each in zip(cells, of, strict=True)
        },
    )
    public = tuple((name, float(e.public_steps)) for name, e in chosen.items() if e.public_steps)
    prices = {name: cost(name, entry) for name, entry in chosen.items()}
    costs = tuple((name, prices[entry]) for (entry, _), name in label.items())
    return steps.board(runs, cells=cells, first=first, public=public, costs=costs)


experiment = Experiment(
    recipes,
    rates={"sizes": ("0.5M",), "budgets": (10,), "seeds": (0,), "factors": (0.25, 0.5, 1.0, 2.0)},
    largest={
        "sizes": ("4M",),
        "budgets": (20,),
        "names": ("adamw", "nanochat"),
        "train_tokens": 83_000_000,
    },
    smoke={
        "source": python_documentation(),
        "train_tokens": 40_000,
        "validation_tokens": 8_000,
        "unit": "document",
        "sizes": ("0.25M",),
        "budgets": (10,),
        "names": ("adamw", "muon-groups"),
        "seeds": (0,),
        "training": TrainConfig(batch_size=8, steps=4, compute_dtype="float32"),
        "length": 64,
    },
)

if __name__ == "__main__":
    experiment.main()
