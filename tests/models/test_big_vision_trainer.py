"""The ViT under the trainer of big_vision: the calls of its `train.py`, in its order and with its arguments.

The calls are written down from the public interface of big_vision, which has no releases that could be installed.
"""

import contextlib
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from marks import exhaustive
from ml_collections import ConfigDict
from small_models import assert_trees_equal, jit, random_params, save_npz

from dcvit.models import vit
from dcvit.models.trees import unstack_blocks

SMALL = {"patch_size": (4, 4), "width": 16, "depth": 2, "mlp_dim": 16, "num_heads": 4, "rep_size": True}
CONFIG = {"num_classes": 7, "model": {**SMALL, "dropout": 0.1}}
BLOCK = {"sa", "+sa", "mlp", "+mlp"}


def make(config):
    """Return the model, and the function that initializes it, as the trainer builds them."""
    model = vit.Model(num_classes=config.num_classes, **config.get("model", {}))

    def init(rng):
        return model.init(rng, jnp.zeros((8, 8, 8, 3), jnp.float32))["params"]

    return model, init


def train_step(model, params, batch, rng):
    """Return loss and new parameters of one step of gradient descent, as the trainer computes them."""

    def loss_fn(params):
        logits, _ = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": rng})
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * batch["labels"], axis=-1))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return loss, optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.with mesh.. context manager:DeprecationWarning")  # the trainer uses it
@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        exhaustive(
            {
                "compose": "both",
                "scan": True,
                "remat_policy": "dots_with_no_batch_dims_saveable",
                "dtype_mm": "bfloat16",
            }
        ),
        exhaustive({"depth": 1, "compose": "both", "set_mesh": True}),
    ],
    ids=["unrolled", "scanned", "with a mesh"],
)
def test_trainer_initializes_trains_and_evaluates_the_model(options, caplog):
    """On a mesh of two devices whose axis splits batch and parameters, with transfers to and from devices forbidden.

    With the mesh that docs/big_vision.md sets in the launcher, each device computes attention of its own 4 examples.
    """
    options = dict(options)
    is_set = options.pop("set_mesh", False)
    caplog.set_level(logging.INFO, logger="dcvit.dcmha")
    config = ConfigDict({**CONFIG, "model": {**CONFIG["model"], **options}}).lock()
    model, init = make(config)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    key = jax.device_put(jax.random.PRNGKey(0), NamedSharding(mesh, P()))
    shapes = jax.eval_shape(init, key)
    split = jax.tree.map(lambda x: NamedSharding(mesh, P("data") if x.shape[0] % 2 == 0 else P()), nn.unbox(shapes))
    rng = np.random.default_rng(0)
    batch = {"image": rng.normal(size=(8, 8, 8, 3)), "labels": np.eye(7)[rng.integers(7, size=8)]}
    batch = jax.device_put(jax.tree.map(np.float32, batch), NamedSharding(mesh, P("data")))
    launcher = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    with (
        jax.set_mesh(launcher) if is_set else contextlib.nullcontext(),
        mesh,
        nn.logical_axis_rules([("act_batch", "data")]),
        jax.transfer_guard("disallow"),
    ):
        params = jit(init, out_shardings=split)(key)
        step = jit(lambda *args: train_step(model, *args), out_shardings=(NamedSharding(mesh, P()), split))
        losses = []
        for _ in range(2):
            loss, params = step(params, batch, key)
            losses.append(loss)
        logits, out = jit(lambda p, image: model.apply({"params": p}, image))(params, batch["image"])
    assert any("float32[4, 4, 4, 4]" in message for message in caplog.messages) == is_set
    assert losses[-1] < losses[0]
    assert out["logits"].shape == logits.shape == (8, 7)
    alone, _ = jit(lambda p, image: model.apply({"params": p}, image))(
        jax.device_get(params), jax.device_get(batch["image"])
    )
    np.testing.assert_allclose(logits, alone, atol=0.03 if "dtype_mm" in options else 1e-5)


def test_intermediates_have_big_visions_names():
    """Evaluators of big_vision select features by these names, such as `representation_layer="pre_logits"`."""
    model, init = make(ConfigDict({"num_classes": 7, "model": SMALL}))
    shapes = jax.eval_shape(init, jax.random.PRNGKey(0))
    logits, out = jax.eval_shape(lambda p: model.apply({"params": p}, jnp.zeros((8, 8, 8, 3))), shapes)
    assert out.keys() == {
        "stem", "with_posemb", "encoder", "encoded", "head_input", "pre_logits", "pre_logits_2d", "logits", "logits_2d"
    }  # fmt: skip
    assert out["encoder"].keys() == {"block00", "block01", "pre_ln"}
    assert out["encoder"]["block00"].keys() == out["encoder"]["block01"].keys() == BLOCK
    assert out["pre_logits_2d"].shape == (8, 2, 2, 16)
    assert logits.shape == out["logits"].shape == (8, 7)


@pytest.mark.slow
def test_load_takes_the_arguments_of_the_trainer(tmp_path):
    """`load(params, init_file, config.model, **config.model_load)`; the head keeps its initial values."""
    config = ConfigDict({"num_classes": 7, "model": {**SMALL, "scan": True}, "model_load": {"dont_load": ["head/.*"]}})
    _, init = make(config.lock())
    saved = random_params(
        jax.eval_shape(make(ConfigDict({"num_classes": 5, "model": SMALL}))[1], jax.random.PRNGKey(0))
    )
    path = save_npz(tmp_path / "checkpoint.npz", {"params": saved})
    start = random_params(jax.eval_shape(init, jax.random.PRNGKey(0)), seed=2)
    loaded = vit.load(start, str(path), config.get("model"), **config.get("model_load", {}))
    assert_trees_equal(loaded["head"], start["head"])
    assert_trees_equal({**unstack_blocks(loaded), "head": saved["head"]}, saved)


@pytest.mark.slow
def test_head_bias_starts_at_the_given_value():
    small = {**SMALL, "depth": 0, "rep_size": False}
    biased, plain = (
        jit(vit.Model(7, **small, **options).init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
        for options in ({"head_bias_init": -6.9}, {})
    )
    np.testing.assert_array_equal(biased["head"]["bias"], np.full(7, -6.9, np.float32))
    assert not biased["head"]["kernel"].any()
    assert not plain["head"]["bias"].any()
    assert_trees_equal({**biased, "head": plain["head"]}, plain)
