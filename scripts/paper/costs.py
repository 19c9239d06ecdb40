"""Tables 2, 6, 7 and 10: parameters, operations and cache of the paper's models, counted without training."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from paper.table import Table, bars

from dcvit.config.load import load
from dcvit.hub.kinds import make_model
from dcvit.models import flops, lm
from dcvit.models.presets import decode_preset
from dcvit.models.trees import param_shapes

CONTEXT, VOCABULARY = 2048, 50_257  # of the paper's models


def row_of(length: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of one row of `length` tokens, (1, length) of int32."""
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def parameters(net: nn.Module, example: jax.ShapeDtypeStruct | None = None) -> int:
    """Return the number of parameters of a language model, or of a ViT for images like `example`."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(net, example or row_of(2))))


def cache_per_token(net: lm.LM, context: int) -> float:
    """Return how many numbers the KV cache stores per token of a full context, summed over all layers."""
    cache = jax.eval_shape(functools.partial(lm.init_cache, net, 1, context))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(cache["layers"])) / context


def training_operations(net: lm.LM, context: int) -> int:
    """Return the number of operations of a training step for one row of `context` tokens, without masked pairs."""
    return flops.training_flops(net, row_of(context))


# Model, sequence length S, and the percentages of the paper. For 6.9B and ρ = 0.5 it prints S = 4096, although
# ρ = S/D_m is 0.5 at S = 2048 and the percentage is that of ρ = 0.5.
TABLE_2 = (("1.4B", 2048, 2.6, 4.8), ("6.9B", 2048, 1.3, 1.9), ("6.9B", 8192, 1.3, 3.3))


def extra_parameters(head_dim: int, rank: int = 2) -> float:
    """Return the share of parameters that composition adds to a layer by Eqn 10, (2R + 1)/(3·D_h)."""
    return (2 * rank + 1) / (3 * head_dim)


def extra_operations(head_dim: int, rho: float, rank: int = 2) -> float:
    """Return the share of operations that composition adds by Eqn 11, 4(2R + 1)(1 + ρ)/((12 + ρ)·D_h)."""
    return 4 * (2 * rank + 1) * (1 + rho) / ((12 + rho) * head_dim)


def layers(size: str, composed: bool, depth: int) -> lm.LM:
    """Return a model with `depth` layers of the paper's model `size`, without windows, and a vocabulary of 2 tokens."""
    preset, shape = f"{'DCFormer' if composed else 'Transformer'}-{size}", {}
    if size == "6.9B":  # GPT-3's architecture, as Appendix E assumes, in a size that only LLaMA's has
        large = lm.Model(2, preset=f"Transformer++-{size}")
        preset, shape = "Transformer-1.4B", {"width": large.width, "num_heads": large.num_heads, "mlp_dim": None}
    return lm.Model(2, preset=preset, implementation="reference", compose="both" if composed else None, depth=depth,
                    window_pattern="none", context=8192, qk_norm=None, **shape)  # fmt: skip


def extra(size: str, count: Callable[[lm.LM], float]) -> float:
    """Return by how many percent `count` of a composed layer exceeds a plain one's, from models of 1 and 2 layers."""
    plain, composed = (count(layers(size, some, 2)) - count(layers(size, some, 1)) for some in (False, True))
    return 100 * (composed / plain - 1)


def table2() -> Table:
    """Return Table 2: parameters and operations that composition adds to a layer, in percent of the plain layer."""
    rows = []
    for size, length, paper_parameters, paper_operations in TABLE_2:
        net = layers(size, False, 1)
        head_dim, rho = net.width // net.num_heads, length / net.width
        rows.append({
            "model": size, "S": length, "ρ": rho,
            "params, formula %": 100 * extra_parameters(head_dim), "params, counted %": extra(size, parameters),
            "params, paper %": paper_parameters, "FLOPs, formula %": 100 * extra_operations(head_dim, rho),
            "FLOPs, counted %": extra(size, functools.partial(flops.lm_flops, length=length)),
            "FLOPs, paper %": paper_operations,
        })  # fmt: skip
    note = (
        "The formula of parameters omits 4R²/(3·D_h²). That of FLOPs counts compositions for all query-key pairs, and "
        "plain attention for the half that causality allows; “counted” has the visible pairs of both."
    )
    picture = bars(rows, "model", "FLOPs, formula %", "FLOPs, paper %")
    return Table("table2", "Table 2: extra parameters and FLOPs of DCMHA in a layer", rows, [note], picture)


# Throughput of DCFormer++ in percent of Transformer++: training, and generation with and without windows there.
TABLE_6 = {"2.8B": (74.5, 87.9, 81.1), "6.9B": (83.1, 94.5, 88.7), "13B": (84.4, 95.1, 89.9), "33B": (89.2, 94.8, 89.7)}


def table6() -> Table:
    """Return Table 6: operations in training, and the cache in generation, as bounds of DCFormer++'s speed."""
    rows = []
    for size, (training, generation, generation_same) in TABLE_6.items():
        plain, composed = (lm.Model(VOCABULARY, preset=f"{name}-{size}") for name in ("Transformer++", "DCFormer++"))
        same = lm.Model(VOCABULARY, **{**decode_preset(f"Transformer++-{size}"), "window_pattern": "1:1"})
        for case, count, net, paper in (
            ("training, FLOPs", training_operations, plain, training),
            ("training, FLOPs, same windows", training_operations, same, None),
            ("generation, cache", cache_per_token, plain, generation),
            ("generation, cache, same windows", cache_per_token, same, generation_same),
        ):
            bound = 100 * count(net, CONTEXT) / count(composed, CONTEXT)
            rows.append({"case": f"{size} {case}", "bound of the speed %": bound, "paper %": paper})
    note = (
        "Speed is that of DCFormer++ in percent of Transformer++, which has no windows unless it says “same windows”: "
        f"bounds by the FLOPs of a training step, and the numbers in the cache per token, of {CONTEXT} tokens."
    )
    picture = bars(rows, "case", "bound of the speed %", "paper %")
    return Table("table6", "Table 6: bounds of the overhead of DCFormer++", rows, [note], picture)


# The paper's parameters in millions (Table 7) and relative sizes (Table 8).
TABLE_7 = {"ViT-S/16": (22, 1.0), "DCViT-S/16": (22, 1.03), "ViT-M/16": (39, 1.72)}


def table7() -> Table:
    """Return Table 7: the shapes, parameters and operations of the paper's models for images of 224×224 pixels."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    nets = {name: make_model(load(f"vit_i1k:variant={name}")) for name in TABLE_7}
    counts = {name: (parameters(net, image), flops.vit_flops(net, image.shape[1:])) for name, net in nets.items()}
    rows = [
        {
            "model": name, "layers": net.depth, "width": net.width, "MLP width": net.mlp_dim, "heads": net.num_heads,
            "parameters": counts[name][0], "parameters in millions, paper": TABLE_7[name][0],
            "relative parameters": counts[name][0] / counts["ViT-S/16"][0],
            "relative FLOPs": counts[name][1] / counts["ViT-S/16"][1],
            "relative size, paper's Table 8": TABLE_7[name][1],
        }
        for name, net in nets.items()
    ]  # fmt: skip
    return Table("table7", "Table 7: ViT architectures", rows)


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
    """Return Table 10: costs of DCFormer++-6.9B against Transformer++-6.9B without windows, which bound its speed."""
    plain = lm.Model(VOCABULARY, preset="Transformer++-6.9B")
    operations, cache = training_operations(plain, CONTEXT), cache_per_token(plain, CONTEXT)
    rows = []
    for name, (pattern, branches, perplexity, training, generation) in TABLE_10.items():
        net = lm.Model(VOCABULARY, preset="DCFormer++-6.9B", window_pattern=pattern, branches=branches, scan=True)
        rows.append({
            "local:global": name, "parameters": parameters(net),
            "TFM++ FLOPs / FLOPs %": 100 * operations / training_operations(net, CONTEXT),
            "training speed, paper %": training,
            "cache / TFM++ cache %": 100 * cache_per_token(net, CONTEXT) / cache,
            "generation speed, paper %": generation, "perplexity 405M, paper": perplexity,
        })  # fmt: skip
    picture = bars(rows, "local:global", "TFM++ FLOPs / FLOPs %", "training speed, paper %")
    return Table("table10", "Table 10: trade-offs of DCFormer++-6.9B, as bounds", rows, (), picture)
