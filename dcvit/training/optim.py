"""Optimizer: a chain of optax transformations in big_vision's order.

    update = -schedule(step) · layer_scale · (lr · lr_mult · optimizer(clip(gradient)) + wd · wd_mult · parameter)

Weight decay follows the schedule but is not multiplied by the learning rate: 1e-4 here equals AdamW's 0.1 at a learning
rate of 1e-3. `wd_times_lr` multiplies it by the learning rate, as AdamW does. `layer_scale` is 1 unless `layer_decay`
is set; see `layer_scales`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

from dcvit.config.durations import Durations, is_duration
from dcvit.config.keys import is_rate
from dcvit.errors import ConfigError, check_call, first_line, matches, nearest
from dcvit.models.trees import matrix_axes
from dcvit.parallel.trees import names_of, shapes_of
from dcvit.weights.placement import SINGLE, unrolled

if TYPE_CHECKING:  # some machines with GPUs do not have this library
    from ml_collections import ConfigDict

PyTree: TypeAlias = Any  # of parameters, their shapes or their updates
Rules = Sequence[Any]  # pairs (regex, value), which are lists in a config that was JSON
Schedule = Callable[[jax.Array | int], jax.Array]
RATES = (  # of `config.optax`: numbers that are not negative
    "b1", "b2", "b3", "decay", "eps", "eps_root", "momentum", "beta", "consistent_rms", "adam_b1", "adam_b2",
)  # fmt: skip
DECAYS = ("cosine", "linear", "rsqrt", "constant")  # of a schedule
MAX_NS_STEPS = 20  # the iterations are unrolled
EMBEDDINGS = re.compile(r"(embedding|pre_norm)/.*|pos_embedding|cls|registers")
LAST_NORM = re.compile(r"Transformer/(encoder|decoder)_norm/.*")  # of the blocks' output


def schedule(
    total_steps: int,
    *,
    decay_type: str = "cosine",
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    end: float = 0.0,
    timescale: float = 10_000,
) -> Schedule:
    """Return the factor of the learning rate at each step; it is 1 at the peak.

    Args:
      total_steps: length of training.
      decay_type: "cosine" or "linear" from 1 to `end` between the warm-up and the last step; "rsqrt",
        1/sqrt(1 + (step - warmup_steps)/timescale) (Zhai et al., 2022); or "constant".
      warmup_steps: length of a linear increase from 0.
      cooldown_steps: length of a linear decrease to 0 over the last steps, a factor on the decay.
      end: the final factor of "cosine" and "linear".
      timescale: time scale of "rsqrt", in steps.

    Raises:
      ValueError: an unknown `decay_type`, or warm-up and cool-down longer than the training.
    """
    if decay_type not in DECAYS:
        raise ValueError(f"decay_type={decay_type!r}; known: {', '.join(DECAYS)}")
    if not math.isfinite(end):
        raise ValueError(f"end={end} should be finite")
    if timescale <= 0:
        raise ValueError(f"timescale={timescale} should be above 0")
    if warmup_steps < 0 or cooldown_steps < 0 or warmup_steps + cooldown_steps > total_steps:
        raise ValueError(f"warm-up {warmup_steps} + cool-down {cooldown_steps} do not fit into {total_steps} steps")

    def factor(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup_steps) / max(1, total_steps - warmup_steps), 0, 1)
        if decay_type == "cosine":
            value = end + (1 - end) * 0.5 * (1 + jnp.cos(math.pi * progress))
        elif decay_type == "linear":
            value = end + (1 - end) * (1 - progress)
        elif decay_type == "rsqrt":
            value = jax.lax.rsqrt(1 + jnp.maximum(0.0, step - warmup_steps) / timescale)
        else:
            value = jnp.ones_like(step)
        if warmup_steps:
            value = value * jnp.minimum(1.0, step / warmup_steps)
        if cooldown_steps:
            value = value * jnp.clip((total_steps - step) / cooldown_steps, 0, 1)
        return value

    return factor


def first_match(params: PyTree, rules: Rules, default: float | None, what: str) -> PyTree:
    """Return for each parameter the value of the first rule (regex, value) that matches its whole name, or `default`.

    Raises:
      ValueError: a rule matches no parameter, so it is most likely misspelled.
    """
    names = names_of(params)
    values = dict[str, float | None]()
    for pattern, value in rules:
        found = matches(pattern, jax.tree.leaves(names), what)
        if not found:
            raise ValueError(f"{what}: {pattern!r} matches no parameter")
        values = dict.fromkeys(found, value) | values
    return jax.tree.map(lambda name: values.get(name, default), names)


def layers_of(params: PyTree, depth: int) -> dict[str, np.ndarray]:
    """Return the layer of each parameter by its name: 0 for embeddings, 1 … `depth` for blocks, `depth` + 1 for others.

    The arrays of integers broadcast against the parameters: scalars, or shape L 1 1 … for L layers of a scan.
    """
    shapes, numbers = shapes_of(params), dict[str, list[int]]()
    for name, part in unrolled(shapes).items():
        block = SINGLE.fullmatch(name)
        number = 1 + int(block["number"]) if block else 0 if EMBEDDINGS.fullmatch(name) else depth + 1
        numbers.setdefault(part.path, []).append(number)
    stacked = {part.path for part in unrolled(shapes).values() if part.layer is not None}
    return {
        name: np.reshape(found, (-1, *[1] * (len(shapes[name]) - 1)) if name in stacked else ())
        for name, found in numbers.items()
    }


def layer_scales(params: PyTree, decay: float, depth: int) -> PyTree:
    """Return for each parameter the factor decay^(depth + 1 - layer) of its update, float32; layers are of `layers_of`.

    These are the scales of `timm.optim.param_groups_layer_decay`. As there, the norm after the blocks belongs to the
    last block, and the weight decay is scaled too: AdamW multiplies it by the learning rate of the layer.
    """
    layers = layers_of(params, depth)
    layers |= {name: np.asarray(depth) for name in layers if LAST_NORM.fullmatch(name)}
    return jax.tree.map(lambda name: np.float32(decay ** (depth + 1.0 - layers[name])), names_of(params))


def frozen_parts(params: PyTree, patterns: Sequence[str], freeze_layers: int | None, depth: int) -> PyTree:
    """Return for each parameter a mask, True where it is not trained, that broadcasts against it.

    The names of parameters that are not trained match one of the regexes `patterns`. `freeze_layers` blocks, from the
    first one, and the embeddings are not trained either; None: no block and no embedding.

    Raises:
      ValueError: `freeze_layers` is out of range, a regex matches no parameter, or it freezes all or nothing.
    """
    if freeze_layers is not None and not 0 <= freeze_layers <= depth:
        raise ValueError(f"freeze_layers={freeze_layers} should be in 0 … {depth}, the number of blocks")
    named = first_match(params, [(pattern, True) for pattern in patterns], False, "frozen")
    layers = layers_of(params, depth)
    last = -1 if freeze_layers is None else freeze_layers
    masks = jax.tree.map(lambda name, frozen: np.asarray((layers[name] <= last) | frozen), names_of(params), named)
    if freeze_layers is not None and all(mask.all() for mask in jax.tree.leaves(masks)):
        raise ValueError(f"freeze_layers={freeze_layers} leaves no parameter to train")
    if freeze_layers is not None and not any((numbers <= last).any() for numbers in layers.values()):
        raise ValueError(f"freeze_layers={freeze_layers} has no effect: these layers have no parameter to train")
    return masks


def scale_by_adafactor(
    *,
    min_dim_size_to_factor: int = 32,
    decay_rate: float = 0.8,
    beta2_cap: float = 0.999,
    clipping_threshold: float | None = None,
    momentum: float | None = 0.9,
    dtype_momentum: str = "bfloat16",
    eps: float = 1e-30,
) -> optax.GradientTransformation:
    """Return big_vision's Adafactor with momentum (Zhai et al., 2022, arXiv 2106.04560).

    Second moments decay by β2(t) = min(beta2_cap, 1 - t^-decay_rate) at step t = 1, 2, …; those of parameters with two
    dimensions of at least `min_dim_size_to_factor` are factored. `eps` is added to squared gradients. The update of
    each parameter is clipped to the RMS `clipping_threshold`, and averaged with the decay `momentum`, not debiased.
    """

    def beta2(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(beta2_cap, 1 - (jnp.asarray(step, jnp.float32) + 1) ** -exponent)

    scale = optax.scale_by_factored_rms(
        decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor, epsilon=eps, decay_rate_fn=beta2
    )
    clip = optax.clip_by_block_rms(clipping_threshold) if clipping_threshold else optax.identity()
    average = optax.ema(momentum, debias=False, accumulator_dtype=dtype_momentum) if momentum else optax.identity()
    return optax.chain(scale, clip, average)


def muon_matrices(params: PyTree) -> PyTree:
    """Return, for each parameter, its input and output axes as a matrix if Muon updates it; None if Adam does."""

    def axes(name: str) -> MuonDimensionNumbers | None:
        found = matrix_axes(name)
        if found is None:
            return None
        inputs, outputs = found
        return MuonDimensionNumbers(tuple(range(-inputs - outputs, -outputs)), tuple(range(-outputs, 0)))

    return jax.tree.map(axes, names_of(params))


def muon(
    *, beta: float = 0.95, ns_steps: int = 5, nesterov: bool = True, eps: float = 1e-8, mu_dtype: str | None = None,
    consistent_rms: float | None = 0.2, adam_b1: float = 0.9, adam_b2: float = 0.999,
) -> optax.GradientTransformation:  # fmt: skip
    """Return Muon for hidden matrices and Adam for all other parameters (Jordan et al., 2024), by `optax.contrib.muon`.

    The orthogonalized momentum of a matrix M×N is scaled by consistent_rms·√max(M, N), so that the RMS of its entries
    is about that of Adam's updates (Liu et al., 2025, arXiv 2502.16982): the learning rate and weight decay of AdamW
    fit. None: the scale √max(1, N/M), with which Muon needs another learning rate than Adam; see `lr_mults`.

    Raises:
      ValueError: `ns_steps`, the Newton-Schulz iterations, or `beta` is out of range.
    """
    if not 1 <= ns_steps <= MAX_NS_STEPS:
        raise ValueError(f"optax.ns_steps={ns_steps} should be in [1, {MAX_NS_STEPS}]")
    if not 0 <= beta < 1:
        raise ValueError(f"optax.beta={beta} should be in [0, 1)")
    return optax.contrib.muon(
        -1.0,  # the learning rate and its sign are those of `make_optimizer`
        ns_steps=ns_steps, beta=beta, eps=eps, mu_dtype=mu_dtype, nesterov=nesterov, adam_b1=adam_b1, adam_b2=adam_b2,
        muon_weight_dimension_numbers=muon_matrices, consistent_rms=consistent_rms,
    )  # fmt: skip


# The transformations that a config can name.
TRANSFORMATIONS: dict[str, Callable[..., optax.GradientTransformation]] = {
    **{name: getattr(optax, name) for name in dir(optax) if name.startswith("scale_by_") or name == "trace"},
    "scale_by_adafactor": scale_by_adafactor,
    "muon": muon,
}


def zero_frozen(tree: PyTree, masks: PyTree) -> PyTree:
    """Return gradients or updates with zeros where a mask of `frozen_parts` is True."""

    def trained(x: jax.Array, mask: np.ndarray) -> jax.Array:
        return jnp.where(mask, jnp.zeros_like(x), x) if mask.any() else x

    return jax.tree.map(trained, tree, masks)


def make_optimizer(
    config: ConfigDict, params: PyTree, durations: Durations, depth: int = 0
) -> tuple[optax.GradientTransformation, Schedule, PyTree]:
    """Return the optimizer, whose update is the equation of this module, its schedule, and masks of `frozen_parts`.

    Args:
      config: the config.
      params: the parameters, or their shapes.
      durations: the run's length and sizes, which convert epochs and examples to steps.
      depth: number of blocks of the model, for `layer_decay` and `freeze_layers`.

    Raises:
      ConfigError: an unknown transformation or schedule, an argument that does not fit, or a regex that matches no
        parameter.
    """
    _check_transformation(config.optax_name, {**config.optax})
    arguments = {key: x for key, x in config.schedule.items() if not is_duration(key, ("warmup", "cooldown"))}
    for name in ("warmup", "cooldown"):
        arguments[f"{name}_steps"] = durations.steps(config.schedule, name, 0, "config.schedule")
    check_call(schedule, arguments, "config.schedule", args=(durations.total_steps,))
    try:
        factor = schedule(durations.total_steps or 0, **arguments)
        masks = frozen_parts(params, config.frozen, config.freeze_layers, depth)
        optimizer = _chain(config, params, factor, masks, layer_scales(params, config.layer_decay, depth))
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config: {first_line(e)}") from None
    return optimizer, factor, masks


def _check_transformation(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown `config.optax_name`, or `config.optax` that does not fit it."""
    if name not in TRANSFORMATIONS:
        hint = nearest(f"scale_by_{name.removesuffix('w')}", TRANSFORMATIONS)
        raise ConfigError(
            f"config.optax_name={name!r} is no transformation of gradients; {hint}; the learning rate is config.lr, "
            "the weight decay config.wd, and SGD with momentum is 'trace'"
        )
    check_call(TRANSFORMATIONS[name], arguments, "config.optax")
    for key, value in arguments.items():
        if key in RATES and isinstance(value, int | float) and not is_rate(float(value)):
            raise ConfigError(f"config.optax.{key}={value!r} should be finite and not negative")


def _chain(
    config: ConfigDict, params: PyTree, factor: Schedule, masks: PyTree, scales: PyTree
) -> optax.GradientTransformation:
    """Return the optimizer; `scales` are those of `layer_scales`.

    Frozen parameters do not contribute to the norm of clipping.
    """
    lr, wd = config.lr, config.wd
    lr_mult = first_match(params, config.lr_mults, 1.0, "lr_mults")
    wd_mult = first_match(params, config.wd_mults, 0.0, "wd_mults") if wd else None
    is_trained = jax.tree.map(lambda mask: not mask.all(), masks)

    def freeze(updates: PyTree, _: PyTree) -> PyTree:
        return zero_frozen(updates, masks)

    def scale(updates: PyTree, _: PyTree) -> PyTree:
        return jax.tree.map(lambda u, mult: u * (lr * mult), updates, lr_mult)

    def decay(updates: PyTree, params: PyTree) -> PyTree:
        rate = wd * lr if config.wd_times_lr else wd
        return jax.tree.map(lambda u, p, mult: u + p * (rate * mult), updates, params, wd_mult)

    def descend(updates: PyTree, _: PyTree) -> PyTree:
        return jax.tree.map(lambda u, scale: -u * scale.astype(u.dtype), updates, scales)

    masked_freeze = optax.masked(optax.stateless(freeze), True)
    return optax.chain(  # the order and the nesting name the arrays, and the empty nodes, of checkpoints
        masked_freeze,
        optax.clip_by_global_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        optax.masked(TRANSFORMATIONS[config.optax_name](**config.optax), is_trained),
        optax.stateless(scale),
        optax.stateless(decay) if wd else optax.identity(),
        optax.scale_by_schedule(factor),
        optax.stateless(descend),
        masked_freeze,
    )


def at_step(opt_state: PyTree, step: jax.Array) -> PyTree:
    """Return the optimizer state with the schedule set to `step`, so that skipped steps count in the schedule too."""

    def is_schedule(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def placed(node: PyTree) -> PyTree:
        return node._replace(count=step) if is_schedule(node) else node

    return jax.tree.map(placed, opt_state, is_leaf=is_schedule)
