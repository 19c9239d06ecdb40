"""Fine-tuning: layer-wise decay, frozen layers and the warm-up of averaged weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import exhaustive
from small_models import random_params, stack_blocks
from training_runs import make_step, optimizer_of, refusal, same, small_lm_setup, small_setup

from dcvit.models.trees import unstack_blocks
from dcvit.parallel.trees import by_name, nested

pytestmark = pytest.mark.usefixtures("library_promotion")

DEPTH = 4
SETUPS = {  # with the numbers of layers in the body of a scan
    "vit": (small_setup, {}, 1),
    "lm": (small_lm_setup, {}, 1),
    "vit, scan of pairs": (small_setup, {"model.compose": "both", "model.compose_layers": (1, 3)}, 2),
}


def unrolled_shapes(make, options):
    return make(**options, **{"model.depth": DEPTH, "model.scan": False}).model.shapes


def optimized(params, gradients, depth=DEPTH, **options):
    """Return the parameters after these gradients, by name."""
    options = {"lr": 0.1, "schedule": {"decay_type": "constant"}, "wd": 0.1, "wd_mults": [(".*", 1.0)]} | options
    tx = optimizer_of(params, len(gradients), depth, **options)
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return by_name(params)


def kind_of(name):
    """The layer of a parameter by the rule of timm, written out: stem, block, the norm after the blocks, the rest."""
    if "block_" in name:
        return 1 + int(name.split("block_")[1].split("/")[0])
    if name.startswith("Transformer/"):
        return "norm"
    return 0 if name.startswith(("embedding/", "pos_embedding", "cls")) else DEPTH + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit", exhaustive("lm"), pytest.param("vit, scan of pairs", marks=pytest.mark.weekly)]
)
def test_decay_and_freezing_are_the_same_for_stacked_layers_and_follow_the_equation(name):
    """A step of gradient descent in numpy, without the frozen parameters; three steps of Adam, stacked and unrolled."""
    make, options, period = SETUPS[name]
    params, *gradients = (random_params(unrolled_shapes(make, options), seed) for seed in range(4))
    recipe = {"layer_decay": 0.6, "freeze_layers": 2, "grad_clip_norm": 0.5}
    descent = optimized(params, gradients[:1], optax_name="trace", optax={"decay": 0.0}, **recipe)
    p, g = by_name(params), by_name(gradients[0])
    layer = {key: kind_of(key) for key in p}
    free = {key for key in p if layer[key] == "norm" or layer[key] > 2}
    assert 0 < len(free) < len(p)
    norm = np.sqrt(sum(np.sum(np.square(g[key], dtype=np.float64)) for key in free))
    for key in p:
        scale = 0.6 ** (DEPTH + 1 - (DEPTH if layer[key] == "norm" else layer[key])) if key in free else 0.0
        expected = p[key] - scale * (0.1 * g[key] * min(1, 0.5 / norm) + 0.1 * p[key])
        np.testing.assert_allclose(descent[key], expected, rtol=1e-5, atol=1e-6, err_msg=key)
    adam = optimized(params, gradients, **recipe)
    stack = lambda tree: stack_blocks(tree, period)  # noqa: E731
    stacked = optimized(stack(params), [stack(tree) for tree in gradients], **recipe)
    assert len(stacked) < len(adam)
    again = by_name(unstack_blocks(nested(stacked)))
    for key, value in adam.items():
        np.testing.assert_allclose(again[key], value, rtol=1e-6, atol=1e-7, err_msg=key)
        assert (value == p[key]).all() == (key not in free), key


def test_decay_multiplies_lr_mults_and_the_decay_of_weights():
    params = {"Transformer": {"encoderblock_1": {"kernel": jnp.ones(1)}}, "head": {"kernel": jnp.ones(1)}}
    zero = jax.tree.map(jnp.zeros_like, params)
    options = {"optax_name": "trace", "optax": {"decay": 0.0}, "lr": 0.1, "lr_mults": [(".*block.*", 0.5)]}
    moved = optimized(params, [params], 2, layer_decay=0.8, **{**options, "wd": 0.0})
    np.testing.assert_allclose([1 - x[0] for x in moved.values()], [0.1 * 0.5 * 0.8, 0.1], rtol=1e-5)
    decayed = optimized(params, [zero], 2, layer_decay=0.8, wd_times_lr=True, **options)
    np.testing.assert_allclose([1 - x[0] for x in decayed.values()], [0.1 * 0.1 * 0.8, 0.1 * 0.1], rtol=1e-5)


@pytest.mark.slow
def test_frozen_layers_do_not_change_and_do_not_count_in_the_norm():
    """Some arrays are frozen as a whole, others for the first of two scanned layers."""
    recipe = {"model.depth": 2, "model.scan": True, "schedule": {"decay_type": "constant"}}
    whole, batch, update = make_step(small_setup(**recipe))
    state, _, frozen_update = make_step(small_setup(**recipe, freeze_layers=1, layer_decay=0.5))
    after, metrics = frozen_update(state, batch)
    before, found = (by_name(unstack_blocks(x.params)) for x in (state, after))
    kept = {key for key in found if (found[key] == before[key]).all()}
    assert kept == {key for key in found if key.startswith(("embedding/", "pos_embedding")) or "block_0/" in key}
    assert 0 < float(metrics["grad_norm"]) < float(update(whole, batch)[1]["grad_norm"])


@pytest.mark.exhaustive
def test_the_backward_pass_ends_at_the_frozen_layers():
    """With all blocks frozen, only the forward pass is left, a third of the operations."""
    flops = []
    for frozen in (None, 1, 2):
        setup = small_setup(**{"model.depth": 2, "model.width": 64}, freeze_layers=frozen)
        state, batch, update = make_step(setup)
        flops.append(update.lower(state, batch).compile().cost_analysis()["flops"])
    assert flops[1] / flops[0] == pytest.approx(2 / 3, abs=0.02)
    assert flops[2] / flops[0] == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.slow
def test_warm_up_of_the_average_counts_updates_and_not_skipped_steps():
    """The first update replaces the initial values; the n-th has the decay min(ema_decay, 1 - n^(-2/3))."""
    setup = small_setup(ema_decay=0.5, ema_warmup=True, schedule={"decay_type": "constant"})
    state, batch, update = make_step(setup)
    bad = batch | {"labels": batch["labels"] * np.nan}
    average = None
    for number, given in enumerate([bad, batch, bad, batch, batch, batch]):
        state, _ = update(state, given)
        if given is bad:
            continue
        n = {1: 1, 3: 2, 4: 3, 5: 4}[number]
        decay = min(0.5, 1 - n ** (-2 / 3))
        average = jax.tree.map(
            lambda e, p, decay=decay: decay * e + (1 - decay) * np.asarray(p, np.float64), average or state.params,
            state.params,
        )  # fmt: skip
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.ema, average)
    assert not same(state.ema, state.params)


def test_frozen_layers_that_leave_nothing_to_train_or_freeze_new_compositions_are_refused():
    everything = {"freeze_layers": 1, "frozen": ["head/.*", "Transformer/encoder_norm/.*"]}
    assert "config: freeze_layers=1 leaves no parameter to train" in refusal(small_setup, **everything)
    start = {"model_init": "absent", "model.depth": 2, "freeze_layers": 1, "model_load.upcycle": True}
    assert "would keep the compositions that model_load.upcycle adds" in refusal(small_setup, **start)
