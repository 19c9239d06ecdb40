"""Meshes and sharding strategies: they split parameters as documented and do not change the result of training."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from trained_workdirs import TINY as DIGITS

from dcvit.config import load as configs
from dcvit.errors import ConfigError
from dcvit.hub import kinds
from dcvit.hub.source import find
from dcvit.models import lm, vit
from dcvit.parallel import sharding
from dcvit.parallel.trees import by_name
from dcvit.runs import restoring
from dcvit.runs.checkpointer import Checkpointer
from dcvit.training import setup, step
from dcvit.training.evaluation import evaluation_mesh
from dcvit.weights.placement import place_params

MESHES = {
    "ddp": [("data", 8)],
    "fsdp": [("data", 2), ("fsdp", 4)],
    "tensor": [("data", 2), ("tensor", 4)],
    "fsdp+tensor": [("data", 2), ("fsdp", 2), ("tensor", 2)],
}
CONTEXTS = {
    "context": [("data", 2), ("context", 4)],
    "context, fsdp": [("data", 2), ("fsdp", 2), ("context", 2)],
    "context, tensor": [("fsdp", 2), ("context", 2), ("tensor", 2)],
}
ATTENTION = {
    "plain": {"model.compose": None},
    "all heads": {"model.compose": "both", "model.static": True},
    "groups": {"model.compose": "both", "model.static": True, "model.groups": 4},
}
TINY = {
    "vit": {"model.width": 32, "model.depth": 2, "model.num_heads": 8, "model.mlp_dim": 32, "model.patch_size": (4, 4)},
    "lm": {
        "model.width": 32, "model.num_heads": 8, "model.mlp_dim": 64, "model.window": 8,
        "model.context": 32, "input.data.context": 32, "evals.validation.data.context": 32,
    },
}  # fmt: skip
CONFIGS = {"vit": "vit_digits", "lm": "lm_stdlib"}


def configured(model, **overrides):
    """Return a tiny config whose optimizer state is the gradient of the step."""
    fixed = {"total_steps": 10, "input.batch_size": 16, "optax_name": "trace", "optax": {"decay": 0.0}, "lr": 0.02}
    fixed |= {"grad_clip_norm": None, "schedule": {"decay_type": "constant"}, "wd": 0.01, "ema_decay": 0.9}
    if model == "lm":  # window patterns of two layers: a scan of two, or one unrolled
        fixed["model.depth"] = 4 if overrides.get("model.scan") else 2
    words = [f"{k}={v}" for k, v in {**fixed, **TINY[model], **overrides}.items()]
    return configs.load(CONFIGS[model], words)


def train_steps(config, devices=None):
    """Return the losses and the states of two steps, on the host, and the last state on the first devices."""
    run = setup.make_setup(config, devices=jax.devices()[:devices], evaluate=False)
    placed = step.state_shapes(run)
    update = step.jit_update(run, placed)

    def first():  # heads of zeros would have no gradients
        params = step.init_params(run, jax.random.key(0))
        params = jax.tree.map(lambda p: p + 0.05 * jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)
        return step.initial_state(run, params)

    losses, states = [], []
    with jax.set_mesh(run.model.mesh):
        state = jax.jit(first, out_shardings=jax.tree.map(lambda s: s.sharding, placed))()
        for batch, _ in zip(run.data.batches(0), range(2), strict=False):
            state, metrics = update(state, sharding.put_batch(batch, run.model.mesh, run.data.batch_size))
            losses.append(float(metrics["loss"]))
            states.append(jax.device_get(state))
    return losses, states, state


# Each model has every strategy; attention of each kind and scans occur in both.
CASES = [
    ("lm", "plain", False, ("fsdp", "tensor")),
    ("vit", "all heads", True, ("ddp", "fsdp+tensor")),
    ("vit", "groups", False, ("fsdp", "tensor")),
    ("lm", "groups", True, ("ddp", "fsdp+tensor")),
]


def check_strategies(strategies, model, **options):
    """Compare losses, gradients (the optimizer state), parameters and their average with those of one device."""
    losses, states, _ = train_steps(configured(model, **options), 1)
    for strategy in strategies:
        name, _, context = strategy.partition(" of ")
        placed = {"mesh": CONTEXTS[context] if context else MESHES[name], "sharding_strategy": name}
        found, sharded, last = train_steps(configured(model, **options, **placed))
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for one, many in zip(states, sharded, strict=True):
            for (path, a), b in zip(by_name(one).items(), jax.tree.leaves(many), strict=True):
                atol = min(1e-5, 5e-4 * max(1e-3, float(np.abs(a).max(initial=0))))
                np.testing.assert_allclose(b, a, atol=atol, rtol=0, err_msg=f"{strategy} {path}")
        axes = {name for leaf in jax.tree.leaves(last.params) for axis in leaf.sharding.spec for name in np.ravel(axis)}
        assert axes - {None} == set(name.split("+")) - {"ddp"}


@pytest.mark.slow
def test_sharding_over_all_axes_trains_like_one_device(library_promotion):
    """The strategy that includes the others, with groups of heads on different devices."""
    check_strategies(["fsdp+tensor"], "vit", **{"model.compose": "pre", "model.groups": 4, "model.depth": 1})


@pytest.mark.weekly
@pytest.mark.parametrize(("model", "attention", "scan", "strategies"), CASES)
def test_every_strategy_trains_like_one_device(library_promotion, model, attention, scan, strategies):
    check_strategies(strategies, model, **ATTENTION[attention], **{"model.scan": scan})


@pytest.mark.exhaustive
def test_tokens_split_over_the_axis_context_train_like_one_device(library_promotion):
    """Local and global layers of documents. `test_context_attention.py` composes heads across the axis "tensor"."""
    check_strategies(["ddp of context"], "lm", **ATTENTION["plain"], document_mask=True)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("attention", "options", "strategies"),
    [
        ("plain", {}, ("fsdp+tensor of context, tensor",)),
        ("all heads", {"model.scan": True, "model.remat": "attention"}, ("ddp of context", "fsdp of context, fsdp")),
        ("groups", {"model.window": 20, "model.num_key_heads": 4}, ("fsdp+tensor of context, tensor",)),
        ("groups", {"model.scan": True, "model.remat": "full", "document_mask": True}, ("fsdp of context, fsdp",)),
        (
            "all heads",
            {"model.num_key_heads": 4, "loss_chunk": 12, "document_mask": True},
            ("fsdp+tensor of context, tensor",),
        ),
    ],
)
def test_every_model_trains_like_one_device_with_split_tokens(library_promotion, attention, options, strategies):
    check_strategies(strategies, "lm", **{**ATTENTION[attention], **options})


def spec(name, shape, strategy, mesh):
    tree = functools.reduce(lambda tree, part: {part: tree}, reversed(name.split("/")), np.empty(shape, np.float32))
    (sharded,) = jax.tree.leaves(sharding.shardings(tree, sharding.make_mesh(mesh), strategy))
    return tuple(sharded.spec)


BLOCK = "Transformer/decoderblock_0/MultiHeadDotProductAttention_0"
SPECS = [
    (f"{BLOCK}/query/kernel", (32, 8, 4), "fsdp+tensor", ("fsdp", "tensor", None)),
    (f"{BLOCK}/out/kernel", (8, 4, 32), "fsdp+tensor", ("tensor", None, "fsdp")),
    (f"{BLOCK}/pre/w_q1", (32, 1, 64), "tensor", (None, None, None)),  # every device composes with all heads
    (f"{BLOCK}/pre/w_q1", (32, 4, 16), "fsdp+tensor", ("fsdp", "tensor", None)),
    (f"{BLOCK}/post/w_kg", (32, 8), "tensor", (None, "tensor")),
    ("Transformer/decoderblock_0/MlpBlock_0/gate/kernel", (32, 64), "fsdp+tensor", ("fsdp", "tensor")),
    ("embedding/embedding", (257, 32), "fsdp+tensor", (None, ("tensor", "fsdp"))),  # a prime number of tokens
    ("head/kernel", (32, 257), "fsdp+tensor", (("tensor", "fsdp"), None)),
    ("embedding/kernel", (16, 16, 3, 32), "fsdp+tensor", (None, None, None, "fsdp")),
    # The first dimension of a scan is the layer, and the optimizer state is sharded like its parameter.
    ("Transformer/group/layer_1/MlpBlock_0/in/kernel", (16, 32, 64), "fsdp+tensor", (None, "fsdp", "tensor")),
    ("opt_state/2/mu/Transformer/encoderblock/MlpBlock_0/Dense_0/bias", (16, 64), "tensor", (None, "tensor")),
]


@pytest.mark.parametrize(("name", "shape", "strategy", "expected"), SPECS)
def test_parameters_are_split_by_heads_hidden_width_or_largest_dimension(name, shape, strategy, expected):
    assert spec(name, shape, strategy, MESHES["fsdp+tensor"]) == expected


def test_custom_rules_give_strategies_or_mesh_axes():
    rules = [(".*/query/kernel", ("tensor", None)), ("head/.*", "fsdp"), (".*_0/.*/w_.*", [["fsdp", "tensor"], None])]
    mesh = MESHES["fsdp+tensor"]
    assert spec(f"{BLOCK}/query/kernel", (32, 8, 4), rules, mesh) == (None, "tensor", None)
    assert spec("head/kernel", (32, 257), rules, mesh) == ("fsdp", None)
    assert spec(f"{BLOCK}/pre/w_kg", (32, 8), rules, mesh) == (("fsdp", "tensor"), None)
    assert spec("embedding/embedding", (257, 32), rules, mesh) == (None, None)
    with pytest.raises(ConfigError, match=r"tensor 2 does not divide 257 of head/kernel"):
        spec("head/kernel", (32, 257), [("head/.*", (None, "tensor"))], mesh)
    # An array in the optimizer state of another shape, as in factored optimizers, is replicated.
    assert spec("opt_state/0/v_row/head/kernel", (32,), [*rules[:1], ("head/.*", ("fsdp", None))], mesh) == (None,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        lm.Model(32, width=32, depth=2, num_heads=4),
        vit.Model(10, variant="mu/4", scan=True, depth=5, compose_layers=(1, 3)),
    ],
)
def test_every_matrix_of_both_models_is_split(model):
    """Both axes of fsdp+tensor split every matrix, except matrices that the tensor axis replicates."""
    model = model.clone(num_heads=4, compose="both", groups=4)
    shape, dtype = ((1, 8, 8, 3), jnp.float32) if isinstance(model, vit.ViT) else ((1, 8), jnp.int32)
    example = jax.ShapeDtypeStruct(shape, dtype)
    places = sharding.shardings(
        setup.param_shapes(model, example), sharding.make_mesh(MESHES["fsdp+tensor"]), "fsdp+tensor"
    )
    replicated_over_tensor = r".*(embedding/kernel|pos_embedding|pre_logits/kernel)"
    for name, place in by_name(places).items():
        axes = set(jax.tree.leaves(tuple(place.spec)))
        if re.fullmatch(r".*/(kernel|embedding|w_..?)", name):
            assert "fsdp" in axes, name
            assert "tensor" in axes or re.fullmatch(replicated_over_tensor, name), name


BAD = {
    "unknown axis": ({"mesh": [("model", 8)]}, "config.mesh has no axis 'model'; known: data, fsdp, context, tensor"),
    "idle tensor": ({"mesh": [("data", 4), ("tensor", 2)]}, "has tensor 2: set config.sharding_strategy to"),
    "heads": (
        {"mesh": [("tensor", 8)], "sharding_strategy": "tensor", "model.num_heads": 4, "model.width": 16},
        "tensor 8 does not divide num_heads 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_mesh_that_does_not_fit_is_refused_in_one_line_with_the_arithmetic(name):
    overrides, message = BAD[name]
    config = configs.load("vit_digits", [f"{key}={value}" for key, value in {**DIGITS, **overrides}.items()])
    with refused(ConfigError, message):
        setup.make_setup(config, evaluate=False)


@pytest.mark.parametrize(
    ("options", "mesh", "message"),
    [
        ({"tokens": 36}, {"context": 4}, "rows of 36 tokens are not a multiple of 2 · context 4 = 8"),
        ({"tokens": 24, "num_key_heads": 1, "branches": "q"}, {"context": 4, "tensor": 2}, None),  # folded
        ({"tokens": 32, "implementation": "decode"}, {"context": 4}, "decode does not support this case"),
    ],
)
def test_rows_and_implementations_that_cannot_be_split_are_refused(options, mesh, message):
    tokens, fields = options["tokens"], {f"model.{name}": value for name, value in options.items() if name != "tokens"}
    rows = {"input.data.context": tokens, "model.context": tokens}
    axes = [("data", 8 // np.prod([*mesh.values()]).item()), *mesh.items()]
    strategy = {"sharding_strategy": "tensor"} if "tensor" in mesh else {}
    config = configured("lm", **{"model.compose": "both", **fields, **rows, **strategy, "mesh": axes})
    with refused(ConfigError, message) if message else contextlib.nullcontext():
        setup.make_setup(config, evaluate=False)


def test_process_transfers_the_rows_that_its_devices_hold():
    for axes in MESHES.values():
        mesh = sharding.make_mesh(axes)
        assert sharding.local_rows(mesh, 16) == list(range(16))
        rows = np.arange(32, dtype=np.int32).reshape(16, 2)
        (sent,) = sharding.put_batch({"x": rows}, mesh, 16).values()
        np.testing.assert_array_equal(sent, rows)
        assert sent.sharding.shard_shape(sent.shape)[0] == 16 // sharding.batch_shards(mesh)


@pytest.mark.exhaustive
def test_checkpoint_is_resharded_from_ddp_on_eight_devices_to_both_axes_on_four(tmp_path, library_promotion):
    config, draw = configured("vit", **ATTENTION["groups"]), np.random.default_rng(0)
    first = setup.make_setup(config, evaluate=False)
    state = jax.tree.map(
        lambda s: jax.device_put(np.asarray(draw.random(s.shape), s.dtype), s.sharding), step.state_shapes(first)
    )
    saved = jax.device_get(state)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, state.items(), {})
    checkpointer.close()
    axes = {"mesh": [("fsdp", 2), ("tensor", 2)], "sharding_strategy": "fsdp+tensor"}
    other = configured("vit", **ATTENTION["groups"], **axes)
    run = setup.make_setup(other, devices=jax.devices()[:4], evaluate=False)
    placed = step.state_shapes(run)
    restored = restoring.restore(tmp_path / "checkpoints/5", placed.items())
    found = (restored["params"], restored["ema"], restored["rest"]["opt_state"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), (saved.params, saved.ema, saved.opt_state))
    leaves = zip(jax.tree.leaves(restored["params"]), jax.tree.leaves(placed.params), strict=True)
    assert all(leaf.sharding == place.sharding for leaf, place in leaves)
    loaded = place_params(find(tmp_path).params, placed.ema, str(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), saved.ema)


def test_evaluation_on_another_number_of_devices_logs_a_warning(caplog):
    """The config's mesh is for sixteen devices, and there are eight."""
    config = configured("vit", mesh=[("data", 16)])
    mesh, strategy = evaluation_mesh(config, kinds.make_model(config))
    assert (mesh.shape["fsdp"], strategy) == (8, "fsdp")
    assert "data 16 needs 16 devices, found 8: evaluating with fsdp 8 instead" in caplog.text
