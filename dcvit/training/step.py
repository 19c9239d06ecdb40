"""The training step: what it changes, what it computes, and where its arrays live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dcvit.parallel.sharding import replicated, shardings
from dcvit.training.tasks import Task


class TrainState(flax.struct.PyTreeNode):
    """All that a step changes. `ema` is None where weights are not averaged."""

    step: Any  # int32 scalar, the number of steps done
    params: Any
    opt_state: Any
    ema: Any
    skipped: Any  # int32 scalar, corrupt examples passed over so far
    nonfinite: Any  # int32 scalar, steps passed over because their loss or gradient was not finite

    def items(self) -> dict[str, Any]:
        """As the items of a checkpoint."""
        averaged = {} if self.ema is None else {"ema": self.ema}
        counts = {"step": self.step, "skipped": self.skipped, "nonfinite": self.nonfinite}
        rest = {**counts, "opt_state": self.opt_state}
        return {"params": self.params, **averaged, "rest": rest}

    @property
    def best(self) -> Any:
        """The parameters to evaluate: the averaged ones where there are any."""
        return self.params if self.ema is None else self.ema


def initial_state(config: ConfigDict, params: Any, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    ema = jax.tree.map(jnp.copy, params) if config.ema_decay else None
    counts = {name: jnp.zeros((), jnp.int32) for name in ("step", "skipped", "nonfinite")}
    return TrainState(params=params, opt_state=tx.init(params), ema=ema, **counts)


def state_shapes(
    config: ConfigDict, net: Any, tx: optax.GradientTransformation, example: jax.ShapeDtypeStruct, mesh: Mesh
) -> TrainState:
    """The state's shapes, each with its sharding on the mesh as `config.sharding_strategy` says."""

    def fresh() -> TrainState:
        params = net.init(jax.random.key(0), jnp.zeros(example.shape, example.dtype))["params"]
        return initial_state(config, params, tx)

    shapes = jax.eval_shape(fresh)
    placed: TrainState = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes, shardings(shapes, mesh, config.sharding_strategy),
    )  # fmt: skip
    return placed


def jit_update(
    net: Any, task: Task, tx: optax.GradientTransformation, schedule: Any, shapes: TrainState, mesh: Mesh
) -> Any:
    """`make_update`, jitted for a state placed like `shapes`, whose memory it uses again."""
    places = jax.tree.map(lambda s: s.sharding, shapes)
    update = make_update(net, task, tx, schedule, places.params)
    return jax.jit(update, donate_argnums=0, out_shardings=(places, replicated(mesh)))


def make_update(
    net: Any, task: Task, tx: optax.GradientTransformation, schedule: Any, places: Any = None
) -> Callable[..., Any]:
    """The training step: (state, batch) -> (state, metrics `loss`, `lr`, `grad_norm`, of all parameters and before
    clipping, `nonfinite`, and `skipped` where corrupt examples may be).

    Where loss or gradient is not finite, the step counts in `nonfinite` and changes no parameter, average or optimiser
    state. `places` are the shardings of gradients, where given.
    """
    config, loss_of = task.config, task.loss(net)

    def value_and_grad(*args: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(*args)
        return loss, grads if places is None else jax.lax.with_sharding_constraint(grads, places)

    def update(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        prepare_key, dropout_key = jax.random.split(key)
        prepared = task.prepare(batch, prepare_key)
        loss, grads = accumulate(value_and_grad, state.params, prepared, dropout_key, config.grad_accum)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if config.ema_decay:
            ema = optax.incremental_update(params, ema, 1 - config.ema_decay)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "lr": config.lr * schedule(state.step)}
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        params, opt_state, ema = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, ema), (state.params, state.opt_state, state.ema),
        )  # fmt: skip
        skipped = state.skipped + jnp.sum(batch["_skipped"])
        metrics["nonfinite"] = state.nonfinite + jnp.where(finite, 0, 1)
        if config.input.get("corrupt") == "skip":
            metrics["skipped"] = skipped
        counts = {"step": state.step + 1, "skipped": skipped, "nonfinite": metrics["nonfinite"]}
        return TrainState(params=params, opt_state=opt_state, ema=ema, **counts), metrics

    return update


def accumulate(
    value_and_grad: Callable[..., Any], params: Any, batch: dict[str, jax.Array], key: jax.Array, parts: int
) -> Any:
    """Loss and gradient of a batch as the mean over `parts` equal parts, computed one after the other.

    Every device's examples are dealt out over all parts, so that each part keeps all devices busy.
    """
    if parts == 1:
        return value_and_grad(params, batch, key)

    def deal(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)

    def add(total: Any, numbered: Any) -> tuple[Any, None]:
        i, part = numbered
        result = value_and_grad(params, part, jax.random.fold_in(key, i))
        return jax.tree.map(jnp.add, total, result), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, (jnp.arange(parts), jax.tree.map(deal, batch)))
    return jax.tree.map(lambda x: x / parts, total)


def not_finite(tree: Any) -> list[str]:
    """The names of the arrays of a tree that hold a NaN or Inf in what this process has of them.

    No device waits for another, so that any thread may ask at any time.
    """
    by_device: dict[Any, dict[str, jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    by_device.setdefault(shard.device, {})[name] = shard.data
    checked = []
    for device, arrays in by_device.items():
        with jax.set_mesh(Mesh([device], ("own",))):  # in place of that of the training
            checked.append(_all_finite(arrays))
    return sorted({name for finite in jax.device_get(checked) for name, well in finite.items() if not well})


@jax.jit
def _all_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.all(jnp.isfinite(array)) for name, array in arrays.items()}
