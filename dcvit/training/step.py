"""Training step: its state, its computation, and the placement of its arrays."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from dcvit.dcmha.plan import NotFusedError, Selection, fused_only, selecting
from dcvit.errors import ConfigError
from dcvit.models import Params
from dcvit.models.flops import forward_flops, training_flops
from dcvit.models.packed_images import token_counts
from dcvit.models.upcycling import identity_compositions
from dcvit.parallel.sharding import batch_sharding, compiler_options, replicated, shardings, with_shardings
from dcvit.parallel.trees import by_name
from dcvit.training.distillation import TEACHER
from dcvit.training.evaluation import predictor
from dcvit.training.optim import at_step, zero_frozen
from dcvit.training.setup import Setup
from dcvit.training.tasks import Batch

Metrics = dict[str, jax.Array]
Update = Callable[["TrainState", dict[str, jax.Array]], tuple["TrainState", Metrics]]
ValueAndGrad = Callable[..., tuple[jax.Array, Params]]
Objective = Callable[[Params, "TrainState", dict[str, jax.Array], jax.Array], jax.Array]


class TrainState(flax.struct.PyTreeNode):
    """The state that a training step changes.

    The fields are typed Any because the same tree also holds shapes, shardings and gradients.
    """

    step: Any  # number of completed steps, int32
    params: Any
    opt_state: Any
    ema: Any  # averaged parameters; None if weights are not averaged
    skipped: Any  # number of damaged examples skipped so far, int32
    nonfinite: Any  # number of steps skipped because their loss or gradient was not finite, int32
    # Parameters of the teacher that the model is distilled from, neither trained nor saved; else None.
    teacher: PyTree = None

    def items(self) -> dict[str, Any]:
        """Return the trees that a checkpoint stores, by name: `params`, `ema` if present, and `rest`, all others."""
        averaged = {} if self.ema is None else {"ema": self.ema}
        counts = {"step": self.step, "skipped": self.skipped, "nonfinite": self.nonfinite}
        rest = {**counts, "opt_state": self.opt_state}
        return {"params": self.params, **averaged, "rest": rest}

    @property
    def best(self) -> Params:
        """The parameters to evaluate: the averaged ones if present."""
        return self.params if self.ema is None else self.ema


def initial_state(setup: Setup, params: Params, teacher: Params | None = None) -> TrainState:
    """Return the state before the first step, from all parameters of the model, and those of its teacher if any."""
    ema = jax.tree.map(jnp.copy, params) if setup.config.ema_decay else None
    counts = {name: jnp.zeros((), jnp.int32) for name in ("step", "skipped", "nonfinite")}
    opt_state = setup.plan.optimizer.init(params)
    return TrainState(params=params, opt_state=opt_state, ema=ema, teacher=teacher, **counts)


def init_params(setup: Setup, key: jax.Array) -> Params:
    """Return random initial parameters of the model; compositions are the identity if the run upcycles a plain one."""
    example = setup.task.example
    with selecting(Selection("off")):  # initialization computes no attention
        params: Params = setup.model.module.init(key, jnp.zeros(example.shape, example.dtype))["params"]
    return identity_compositions(params) if setup.model.upcycle else params


def state_shapes(setup: Setup) -> TrainState:
    """Return the training state of a run with a shape, dtype and sharding in place of each array."""
    teacher = setup.task.distillation
    shapes = jax.eval_shape(functools.partial(initial_state, setup), setup.model.shapes, teacher and teacher.shapes)
    placed: TrainState = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes, shardings(shapes, setup.model.mesh, setup.model.strategy),
    )  # fmt: skip
    return placed


def step_flops(setup: Setup) -> int | None:
    """Return the operations of a training step for one example, also those of a teacher's forward pass in the step.

    None if there is no formula for the model; see `dcvit.models.flops.training_flops`.
    """
    example, teacher = setup.task.example, setup.task.distillation
    flops = training_flops(setup.model.module, example)
    return flops and flops + ((forward_flops(teacher.teacher.module, example) or 0) if teacher else 0)


def jit_update(setup: Setup, shapes: TrainState) -> Any:
    """Return the training step of `make_update`, jitted for a state placed like `shapes`; it donates that state."""
    places, mesh = jax.tree.map(lambda s: s.sharding, shapes), setup.model.mesh
    update = make_update(setup, places.params)
    return jax.jit(
        update, donate_argnums=0, out_shardings=(places, replicated(mesh)), compiler_options=compiler_options(mesh)
    )


def make_objective(setup: Setup, module: nn.Module) -> Objective:
    """Return the function (trained parameters, state, prepared batch, dropout key) -> loss, with `module` as the model.

    The state's parameters do not count. Its `teacher` adds the teacher's logits to the batch.
    """
    loss_of, distillation = setup.task.loss(module), setup.task.distillation

    def objective(params: Params, state: TrainState, batch: Batch, key: jax.Array) -> jax.Array:
        if distillation is not None:
            batch = {**batch, TEACHER: distillation.logits(state.teacher, batch["image"])}
        return loss_of(params, batch, key)

    return objective


def make_update(setup: Setup, places: Any = None) -> Update:
    """Return the training step: (state, batch) -> (state, metrics).

    The metrics are `loss`; `lr`; `grad_norm`, over trained parameters and before clipping; `nonfinite`, the number of
    skipped steps; `skipped`, if damaged examples may be skipped; and those of packed images, `token_counts`. A step
    with a non-finite loss or gradient changes no parameter, average or optimizer state. The learning rate follows
    `state.step`, which counts it.

    Args:
      setup: the run.
      places: the shardings of the gradients; None leaves them to the compiler.
    """
    config, plan = setup.config, setup.plan
    objective = make_objective(setup, setup.model.module)

    def value_and_grad(state: TrainState, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Params]:
        try:
            with fused_only() if config.require_fused else contextlib.nullcontext():
                loss, grads = jax.value_and_grad(objective)(params, state, batch, key)
        except NotFusedError as e:
            raise ConfigError(f"config.require_fused: {e}") from None
        return loss, grads if places is None else jax.lax.with_sharding_constraint(grads, places)

    def update(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        prepare_key, dropout_key = step_keys(config.seed, state.step)
        prepared = setup.task.prepare(batch, prepare_key)
        loss_and_grad = functools.partial(value_and_grad, state)
        loss, grads = accumulate(loss_and_grad, state.params, prepared, dropout_key, config.grad_accum)
        grads = zero_frozen(grads, plan.frozen)  # so that the compiler omits what only they need
        updates, opt_state = plan.optimizer.update(grads, at_step(state.opt_state, state.step), state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if config.ema_decay:
            updated = state.step - state.nonfinite
            rate = warm_rate(config.ema_decay, updated) if config.ema_warmup else 1 - config.ema_decay
            ema = optax.incremental_update(params, ema, rate)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "lr": config.lr * plan.schedule(state.step)}
        metrics |= token_counts(batch)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        params, opt_state, ema = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, ema), (state.params, state.opt_state, state.ema),
        )  # fmt: skip
        skipped = state.skipped + jnp.sum(batch["_skipped"])
        metrics["nonfinite"] = state.nonfinite + jnp.where(finite, 0, 1)
        if setup.data.corrupt.action == "skip":
            metrics["skipped"] = skipped
        counts = {"step": state.step + 1, "skipped": skipped, "nonfinite": metrics["nonfinite"]}
        return state.replace(params=params, opt_state=opt_state, ema=ema, **counts), metrics

    return update


def step_keys(seed: int, step: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Return the keys of augmentation and of dropout in the step after `step` steps."""
    of_augmentation, of_dropout = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return of_augmentation, of_dropout


def warm_rate(ema_decay: float, updates: jax.Array) -> jax.Array:
    """Return the weight of new parameters in an average with warm-up; `updates` is the number of earlier updates.

    The decay, 1 - weight, is min(ema_decay, 1 - (1 + updates)^(-2/3)), that of
    `timm.utils.ModelEmaV3(use_warmup=True)`: the first update replaces the initial values.
    """
    return jnp.maximum(1 - ema_decay, (1 + updates.astype(jnp.float32)) ** (-2 / 3))


def accumulate(
    value_and_grad: ValueAndGrad, params: Params, batch: Batch, key: jax.Array, parts: int
) -> tuple[jax.Array, Params]:
    """Return loss and gradient of a batch as the mean over `parts` equal parts, computed one after the other.

    Both equal those of the complete batch. Each part has examples of every device, so that all devices work on each
    part.
    """
    if parts == 1:
        return value_and_grad(params, batch, key)

    def split(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)

    def add(total: Any, numbered: Any) -> tuple[Any, None]:
        i, part = numbered
        result = value_and_grad(params, part, jax.random.fold_in(key, i))
        return jax.tree.map(jnp.add, total, result), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, (jnp.arange(parts), jax.tree.map(split, batch)))
    loss, grads = jax.tree.map(lambda x: x / parts, total)
    return loss, grads


def non_finite_arrays(tree: PyTree) -> list[str]:
    """Return the names of the arrays in a tree that have a NaN or Inf in the shards that this process holds.

    The check involves no communication between devices, so any thread may call it at any time.
    """
    by_device: dict[jax.Device, dict[str, jax.Array]] = {}
    for name, leaf in by_name(tree).items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    by_device.setdefault(shard.device, {})[name] = shard.data
    checked = []
    for device, arrays in by_device.items():
        with jax.set_mesh(Mesh([device], ("own",))):  # replaces the mesh of training
            checked.append(_all_finite(arrays))
    return sorted({name for finite in jax.device_get(checked) for name, ok in finite.items() if not ok})


@jax.jit
def _all_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.all(jnp.isfinite(array)) for name, array in arrays.items()}


def trace(setup: Setup, mode: str = "train") -> tuple[jax.stages.Traced, PyTree, PyTree]:
    """Trace a program for the devices of a run's mesh: "train", the training step, or "forward", inputs to logits.

    Returns:
      The program, and the shapes of its arguments: the state and the batch, or the parameters and the inputs.
    """
    model, example, rows = setup.model, setup.task.example, batch_sharding(setup.model.mesh)
    with jax.set_mesh(model.mesh):
        if mode == "train":
            state = state_shapes(setup)
            batch = {
                key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows)
                for key, array in setup.data.repeated().items()
            }
            return jit_update(setup, state).trace(state, batch), state, batch
        predict = predictor(model.module)
        params = with_shardings(model.shapes, model.mesh, model.strategy)
        shape = (setup.data.batch_size, *example.shape[1:])
        inputs = jax.ShapeDtypeStruct(shape, example.dtype, sharding=rows)
        logits = jax.jit(
            lambda params, inputs: predict(params, inputs)[0],
            out_shardings=rows,
            compiler_options=compiler_options(model.mesh),
        )
        return logits.trace(params, inputs), params, inputs
