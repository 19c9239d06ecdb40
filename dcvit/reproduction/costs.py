"""Costs of models that are counted without training: operations, parameters and cache (Tables 2, 7 and 10)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcvit.config.load import load
from dcvit.hub.kinds import make_model
from dcvit.models import flops, lm
from dcvit.models.trees import param_shapes
from dcvit.models.vit import ViT
from dcvit.reproduction.tables import Chart, Row, Table

CONTEXT, VOCABULARY = 2048, 50_257  # of the paper's models


def row_of(length: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of one row of `length` tokens, (1, length) of int32."""
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def parameters(net: nn.Module) -> int:
    """Return the number of parameters of a language model."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(net, row_of(2))))


def cache_per_token(net: lm.LM, context: int) -> float:
    """Return how many numbers the KV cache stores per token of a full context, summed over all layers."""
    cache = jax.eval_shape(functools.partial(lm.init_cache, net, 1, context))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(cache["layers"])) / context


def training_operations(net: lm.LM, context: int) -> int:
    """Return the number of operations of a training step for one row of `context` tokens, without masked pairs."""
    count = flops.training_flops(net, row_of(context))
    assert count is not None
    return count


def program_operations(net: lm.LM, context: int) -> float:
    """Return the number of operations that XLA counts in a forward pass of one row, before it optimizes the program.

    With the implementation "reference" they include masked query-key pairs and element-wise operations.
    """
    shapes = {"params": param_shapes(net, row_of(2))}
    lowered = jax.jit(lambda variables, tokens: net.apply(variables, tokens)[0]).lower(shapes, row_of(context))
    counted = lowered.cost_analysis()
    assert counted is not None
    return float(counted["flops"])


RANK = 2
# Model, sequence length S, and the percentages of the paper. For 6.9B and ρ = 0.5 it prints S = 4096, although
# ρ = S/D_m is 0.5 at S = 2048 and the percentage is that of ρ = 0.5.
TABLE_2 = (("1.4B", 2048, 2.6, 4.8), ("6.9B", 2048, 1.3, 1.9), ("6.9B", 8192, 1.3, 3.3))


def extra_parameters(head_dim: int, rank: int = RANK) -> float:
    """Return the share of parameters that composition adds to a layer by Eqn 10, (2R + 1)/(3·D_h)."""
    return (2 * rank + 1) / (3 * head_dim)


def extra_operations(head_dim: int, rho: float, rank: int = RANK) -> float:
    """Return the share of operations that composition adds by Eqn 11, 4(2R + 1)(1 + ρ)/((12 + ρ)·D_h)."""
    return 4 * (2 * rank + 1) * (1 + rho) / ((12 + rho) * head_dim)


def one_layer(size: str, composed: bool, depth: int) -> lm.LM:
    """Return a model with `depth` layers of the paper's model `size`, without windows, and a vocabulary of 2 tokens."""
    preset = f"{'DCFormer' if composed else 'Transformer'}-{size}"
    shape: dict[str, Any] = {}
    if size == "6.9B":  # GPT-3's architecture, as Appendix E assumes, in a size that only LLaMA's has
        large = lm.Model(2, preset=f"Transformer++-{size}")
        preset, shape = "Transformer-1.4B", {"width": large.width, "num_heads": large.num_heads, "mlp_dim": None}
    return lm.Model(2, preset=preset, implementation="reference", compose="both" if composed else None, depth=depth,
                    window_pattern="none", context=8192, qk_norm=None, **shape)  # fmt: skip


def table2() -> Table:
    """Return Table 2: parameters and operations that composition adds to a layer, in percent of the plain layer."""
    rows: list[Row] = []
    for size, length, paper_parameters, paper_operations in TABLE_2:
        plain, composed = ([one_layer(size, c, depth) for depth in (1, 2)] for c in (False, True))
        net = plain[0]
        head_dim = net.width // net.num_heads
        extra = functools.partial(_extra, plain, composed)
        rho = length / net.width
        rows.append({
            "model": size, "S": length, "ρ": rho,
            "params, formula %": 100 * extra_parameters(head_dim),
            "params, counted %": extra(parameters),
            "params, paper %": paper_parameters,
            "FLOPs, formula %": 100 * extra_operations(head_dim, rho),
            "FLOPs, all pairs %": extra(functools.partial(_all_pairs, length=length)),
            "FLOPs, visible pairs %": extra(functools.partial(flops.lm_flops, length=length)),
            "FLOPs, program %": extra(functools.partial(program_operations, context=length)),
            "FLOPs, paper %": paper_operations,
        })  # fmt: skip
    notes = (
        "Counted parameters are those of the parameter tree; the formula omits 4R²/(3·D_h²). FLOPs of the formula "
        "count compositions for all query-key pairs and plain attention for the half that causality allows. “All "
        "pairs” and “visible pairs” count both for the same pairs, by `dcvit.models.flops`. “Program” is XLA's count "
        "of the unoptimized program, with all pairs, element-wise operations and the zeros of block matrices.",
        "The paper prints S = 4096 for 6.9B and ρ = 0.5; ρ = S/D_m = 0.5 is S = 2048, which is counted here.",
    )
    return Table("table2", "Table 2: extra parameters and FLOPs of DCMHA in a layer", rows, notes,
                 Chart("model", "FLOPs, formula %", None, "FLOPs, paper %"))  # fmt: skip


def _extra(plain: Sequence[lm.LM], composed: Sequence[lm.LM], count: Callable[[lm.LM], float]) -> float:
    """Return by how many percent `count` of a composed layer exceeds a plain one's, from models of 1 and 2 layers."""
    without, with_one = (count(two) - count(one) for one, two in (plain, composed))
    return 100 * (with_one / without - 1)


def _all_pairs(net: lm.LM, length: int) -> float:
    """Return the operations of a forward pass of one row if every token attended to all tokens, also to later ones."""
    pairs = length * (length + 1) // 2
    longer = [flops.lm_flops(net, n) for n in (length, length + 1, length + 2)]
    each = longer[2] - 2 * longer[1] + longer[0]  # the second difference: the cost of one pair
    return longer[0] + (length**2 - pairs) * each


# The paper's parameters in millions (Table 7) and relative sizes (Table 8).
TABLE_7 = {"ViT-S/16": (22, 1.0), "DCViT-S/16": (22, 1.03), "ViT-M/16": (39, 1.72)}


def table7() -> Table:
    """Return Table 7: the shapes, parameters and operations of the paper's models, counted."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    nets = {name: cast(ViT, make_model(load(f"vit_i1k:variant={name}"))) for name in TABLE_7}
    counts = [sum(leaf.size for leaf in jax.tree.leaves(param_shapes(net, image))) for net in nets.values()]
    operations = [flops.vit_flops(net, image.shape[1:]) for net in nets.values()]
    rows: list[Row] = [
        {
            "model": name, "layers": net.depth, "width": net.width, "MLP width": net.mlp_dim, "heads": net.num_heads,
            "parameters": counts[i], "parameters in millions, paper": TABLE_7[name][0],
            "relative parameters": counts[i] / counts[0],
            "relative FLOPs": operations[i] / operations[0], "relative size, paper": TABLE_7[name][1],
        }
        for i, (name, net) in enumerate(nets.items())
    ]  # fmt: skip
    note = (
        "Models of configs/vit_i1k.py for images of 224×224 pixels; FLOPs by dcvit.models.flops. The relative size is "
        "that of the paper's Table 8. Accuracy on stand-ins for ImageNet-1k is in table8."
    )
    return Table("table7", "Table 7: ViT architectures", rows, (note,))


# Column of Table 10: window pattern and branches; the paper's perplexity (405M), training and generation speed in
# percent (6.9B).
TABLE_10 = {
    "1:1": ("1:1", "qk", 10.83, 83.1, 94.5),
    "3:1": ("3:1", "qk", 10.78, 86.6, 99.0),
    "7:1": ("7:1", "qk", 10.83, 88.1, 101.5),
    "1:1 QW": ("1:1", "q", 10.89, 91.5, 99.6),
    "3:1 QW": ("3:1", "q", 10.92, 92.5, 103.3),
}


def table10() -> Table:
    """Return Table 10, costs of the 6.9B model by pattern of local and global layers and by branches."""
    plain = lm.Model(VOCABULARY, preset="Transformer++-6.9B")
    operations, cache = training_operations(plain, CONTEXT), cache_per_token(plain, CONTEXT)
    rows: list[Row] = []
    for name, (pattern, branches, perplexity, training, generation) in TABLE_10.items():
        net = lm.Model(VOCABULARY, preset="DCFormer++-6.9B", window_pattern=pattern, branches=branches, scan=True)
        rows.append({
            "local:global": name,
            "parameters": parameters(net),
            "TFM++ FLOPs / FLOPs %": 100 * operations / training_operations(net, CONTEXT),
            "training speed, paper %": training,
            "cache / TFM++ cache %": 100 * cache_per_token(net, CONTEXT) / cache,
            "generation speed, paper %": generation,
            "perplexity 405M, paper": perplexity,
        })  # fmt: skip
    notes = (
        f"DCFormer++-6.9B at {CONTEXT} tokens against Transformer++-6.9B without windows. FLOPs and cache are counted; "
        "no speed is measured, and the losses need the runs of `--scale full`.",
    )
    return Table("table10", "Table 10: trade-offs of DCFormer++-6.9B, as bounds", rows, notes,
                 Chart("local:global", "TFM++ FLOPs / FLOPs %", None, "training speed, paper %"))  # fmt: skip
