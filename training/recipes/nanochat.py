"""nanochat's recipe: every number follows from the depth.

The code is github.com/karpathy/nanochat at 92d63d4 (2026-07-03). What was tuned at depth 12 is
carried over: batch and rates by the horizon, rates of Adam by the width, weight decay by both.
"""

from __future__ import annotations

import math

from models.shape.validation import Count, check_value
from training.recipes.recipe import UNCLIPPED, Part, Recipe, assemble, part

HEAD = 128
TOKENS_PER_PARAMETER = 12
BATCH = 2**19  # tokens, measured at depth 12
LEFT_OUT = (
    "smear gate, backout, Muon's row equilibration and renormalization, the uniform distribution "
    "of initial matrices"
)
_GPT, _RUN = "nanochat/gpt.py", "scripts/base_train.py"


def nanochat(
    depth: int,
    *,
    width: int | None = None,
    mlp: int | None = None,
    steps: int | None = None,
    vocab_size: int = 32_768,
    length: int = 2048,
) -> Recipe:
    """The recipe of a depth; `width`, `mlp` and `steps` replace what nanochat derives from it."""
    for name, value in {"depth": depth, "vocab_size": vocab_size, "length": length}.items():
        check_value(f"nanochat: {name}", value, Count)
    usual = -(-64 * depth // HEAD) * HEAD
    width = usual if width is None else width
    mlp = 4 * width if mlp is None else mlp
    size = scaling_parameters(depth, width, mlp, vocab_size)
    # Batch and decay follow this ratio of horizons, which tokens per parameter do not change.
    longer = size / scaling_parameters(12, 768, 3072, vocab_size)
    sequences = 2 ** max(0, round(math.log2(BATCH * longer**0.383 / length)))
    batch = sequences * length
    steps = max(TOKENS_PER_PARAMETER * size // batch, 1) if steps is None else steps
    rule = "2^19 (D / D of depth 12)^0.383 tokens, to a power of two sequences (arXiv:2505.13738)"
    return assemble(
        f"nanochat d{depth}" + f" of width {width}" * (width != usual),
        LEFT_OUT,
        *_model(depth, width, mlp, vocab_size, length),
        *_optimizer(width, (batch / BATCH) ** 0.5, longer, steps),
        part("train", rule, batch_size=sequences),
        part("train", f"{_RUN} --max-seq-len", sequence_length=length),
        part("train", "12 tokens per parameter of matrices and head, or as asked", steps=steps),
    )


def scaling_parameters(depth: int, width: int, mlp: int, vocab_size: int) -> int:
    """Parameters of matrices, gates and head, which nanochat's laws count."""
    gates = -(-depth // 2) * 12 * (width // HEAD)
    head = -(-vocab_size // 64) * 64 * width
    return depth * (4 * width * width + 2 * width * mlp) + gates + head


def _model(depth: int, width: int, mlp: int, vocab_size: int, length: int) -> list[Part]:
    heads = {"heads": width // HEAD, "kv_heads": width // HEAD, "head_size": HEAD}
    kinds = {"mlp_kind": "relu2", "norm": "plain_rms", "embedding_norm": True, "tied": False}
    scalars = {"residual_scale": (1.15, 1.05), "input_scale": (0.2, 0.05)}
    starts = {"embedding_std": 0.8, "head_std": 0.001, "zero_outputs": True, "mlp_init_scale": 0.4}
    return [
        part("model", "scripts/tok_train.py", vocab_size=vocab_size),
        part("model", f"{_GPT} pad_vocab_size_to", vocab_multiple=64),
        part("model", "the dial", layers=depth),
        part("model", "64 x depth, up to heads of 128, or fitted to what is asked", embed=width),
        part("model", "embed / 128 (--head-dim)", **heads),
        part("model", "4 x embed, or fitted to a number of parameters", mlp=mlp),
        part("model", _GPT, **kinds, query_key_scale=1.2, rope_base=1e5, logit_soft_cap=15.0),
        part("model", f"{_GPT} has_ve (arXiv:2410.17897)", value_embeddings="alternate"),
        part("model", f"{_RUN} --window-pattern", window_pattern="SSSL"),
        part("model", "length / 4, up to a multiple of 128", window=-(-length // 512) * 128),
        part("model", f"{_GPT} init_weights", **scalars, **starts),
    ]


def _optimizer(width: int, rate: float, longer: float, steps: int) -> list[Part]:
    """Parts of the optimizer; `rate` is the factor on every rate for another batch."""
    warmup = float(min(40, steps - round(0.65 * steps)))
    batch, narrow = "sqrt(batch / 2^19)", (width / 768) ** -0.5
    decay = f"0.28 x {batch} x D of depth 12 / D (arXiv:2405.13698)"
    muon = {"muon_momentum": 0.97, "muon_momentum_start": 0.85, "muon_momentum_warmup": 400}
    found = [
        part("optimizer", f"0.02 x {batch} (--matrix-lr)", learning_rate=0.02 * rate),
        part("optimizer", decay, weight_decay=0.28 * rate / longer),
        part("optimizer", f"{_RUN} get_weight_decay", weight_decay_schedule="cosine"),
        part("optimizer", f"{_RUN} get_muon_momentum", **muon, muon_momentum_end=0.9),
        part("optimizer", "nanochat/optim.py", kind="muon", muon_steps=5, muon_rms=None),
        part("optimizer", "arXiv:2505.16932", muon_iteration="polar_express"),
        part("optimizer", "arXiv:2510.05491", muon_row_beta=0.9),
        part("optimizer", "arXiv:2510.12402", cautious_decay=True),
        part("optimizer", f"{_RUN} get_lr_multiplier", schedule="wsd", decay=0.65),
        part("optimizer", "40 steps, or as many as come before the decay", warmup=warmup),
        part("optimizer", f"{_RUN} --final-lr-frac", min_ratio=0.05),
        part("optimizer", f"{_GPT} setup_optimizer", beta1=0.8, beta2=0.995, epsilon=1e-10),
        part("optimizer", "nanochat clips nothing", clip_norm=UNCLIPPED),
    ]
    groups = {  # rate, whether it falls with the width, what the group has of its own
        "embedding": (0.3, True, {"weight_decay": 0.001}),
        "value_embedding": (0.15, True, {"weight_decay": 0.01}),
        "head": (0.008, True, {"weight_decay": 0.01, "beta2": 0.96}),
        "residual_scale": (0.005, False, {"weight_decay": 0.05, "beta2": 0.95}),
        "input_scale": (0.5, False, {"weight_decay": 0.0, "beta1": 0.96, "beta2": 0.95}),
    }
    for name, (base, falls, own) in groups.items():
        formula = f"{base} x {batch}" + " x (embed / 768)^-0.5" * falls
        here = base * rate * (narrow if falls else 1.0)
        found.append(part(f"optimizer.{name}", formula, learning_rate=here))
        found.append(part(f"optimizer.{name}", f"{_GPT} setup_optimizer", **own))
    return found
