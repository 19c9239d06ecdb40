"""Checkpoints of big_vision in all layouts, compared with timm's reader of them; and the authors' ViT."""

import functools
import json

import jax
import jax.numpy as jnp
import lm_oracle
import ml_dtypes
import numpy as np
import oracle
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from foreign_models import written_back
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from small_models import assert_trees_equal, jit, param_shapes, random_params, stack_blocks

from dcvit.errors import CheckpointError
from dcvit.models import vit
from dcvit.models.trees import unstack_blocks
from dcvit.weights import links as linking
from dcvit.weights.families import FAMILIES, open_weights
from dcvit.weights.family import Description, build
from dcvit.weights.tensors import Tensor

SMALL = dict(patch_size=(8, 8), width=32, depth=2, mlp_dim=40, num_heads=4)
PIXELS = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32)


@functools.cache  # tracing takes most of the time
def random_tree(net):
    example = jax.ShapeDtypeStruct(PIXELS.shape, PIXELS.dtype)
    return jax.tree.map(np.asarray, random_params(param_shapes(net, example), std=0.2))


def make(pool, **fields):
    """Return a model and its random parameters, by path."""
    net = vit.Model(5, **{**SMALL, "pool_type": pool, **fields})
    return net, flatten_dict(random_tree(net), sep="/")


@functools.cache
def outputs_of(net):
    return jit(lambda params, x: net.apply({"params": params}, x)[1])


def tree_of(flat):
    return unflatten_dict({name: np.asarray(x) for name, x in flat.items()}, sep="/")


def under(root, flat):
    return {f"{root}/{name}": x for name, x in flat.items()}


def with_old_names(flat):
    """Return the parameters as before flax linen: numbered modules, and positions inside of `Transformer`."""
    new = {"/MultiHeadDotProductAttention_0/": "/MultiHeadDotProductAttention_1/", "/LayerNorm_1/": "/LayerNorm_2/",
           "/MlpBlock_0/": "/MlpBlock_3/"}  # fmt: skip
    found = {}
    for name, x in flat.items():
        for now, before in new.items():
            name = name.replace(now, before) if name.startswith("Transformer/encoderblock") else name
        found[name] = x
    found["Transformer/posembed_input/pos_embedding"] = found.pop("pos_embedding")
    return found


def with_joint_positions(flat):
    """Return the parameters with a position embedding for the class token."""
    row = np.float32(np.random.default_rng(2).normal(size=(1, 1, 32)))
    return {
        **flat, "cls": flat["cls"] - row, "pos_embedding": np.concatenate([row, flat["pos_embedding"]], axis=1)
    }  # fmt: skip


def with_inlined_head(flat):
    return {name.removeprefix("MAPHead_0/"): x for name, x in flat.items()}


def scanned(flat):
    return flatten_dict(stack_blocks(unflatten_dict(flat, sep="/")), sep="/")


LAYOUTS = {
    "params": ("gap", lambda flat: under("params", flat) | {"opt/0/count": np.int64(3)}),
    "opt/target": ("gap", lambda flat: under("opt/target", flat) | {"opt/state/step": np.int64(3)}),
    "bare": ("map", dict),
    "before 2022": ("tok", lambda flat: {k.replace("pos_emb", "Transformer/pos_emb"): x for k, x in flat.items()}),
    "augreg": ("tok", lambda flat: under("opt/target", with_old_names(with_joint_positions(flat)))),
    "inlined head": ("map", with_inlined_head),
    "scanned": ("gap", lambda flat: under("params", scanned(flat))),
    "towers": (
        "map",
        lambda flat: under("params/img", flat) | {"params/txt/head/kernel": np.ones((2, 3)), "params/t": 1.0},
    ),
}


def write(path, layout, flat):
    """Write an .npz file and return its path, with the subtree of the model."""
    np.savez(path, **{name: np.asarray(x) for name, x in LAYOUTS[layout][1](flat).items()})
    return f"{path}:img" if layout == "towers" else str(path)


def check_same(found, flat, layout):
    """Assert that parameters are the written ones; the sum of class token and its position is rounded once."""
    if layout == "augreg":
        np.testing.assert_allclose(found["cls"], flat["cls"], rtol=0, atol=1e-6)
        found = {**found, "cls": np.asarray(flat["cls"])}
    assert_trees_equal(found, tree_of(flat))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_the_model_and_into_a_model(tmp_path, layout):
    net, flat = make(LAYOUTS[layout][0])
    path = write(tmp_path / "model.npz", layout, flat)
    weights = open_weights(path)
    assert weights.family == "big_vision"
    assert vit.Model(weights.description.num_outputs, **weights.description.fields) == net
    check_same(weights.tree(), flat, layout)
    init = jax.tree.map(np.zeros_like, unflatten_dict(flat, sep="/"))
    check_same(vit.load(init, path, {}), flat, layout)
    stacked = vit.load(stack_blocks(init), path, {"scan": True})
    check_same(unstack_blocks(stacked), flat, layout)


def test_bfloat16_is_read_with_its_values(tmp_path):
    _, flat = make("gap")
    narrow = {name: np.asarray(x).astype(ml_dtypes.bfloat16) for name, x in flat.items()}
    np.savez(tmp_path / "model.npz", **narrow)
    assert_trees_equal(open_weights(tmp_path / "model.npz").tree(), tree_of(narrow))
    loaded = vit.load(unflatten_dict(flat, sep="/"), str(tmp_path / "model.npz"), {})
    assert_trees_equal(loaded, tree_of({name: x.astype(np.float32) for name, x in narrow.items()}))


def save_as_big_vision(path, flat):
    """Write a .bv folder with the library that big_vision writes it with."""
    manager = GlobalAsyncCheckpointManager()
    names = [str(path / name.replace("/", "~")) for name in flat]
    path.mkdir()
    manager.serialize_with_paths([jnp.asarray(x) for x in flat.values()], names, on_commit_callback=lambda: None)
    manager.wait_until_finished()


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "pointer"), [(False, True), (True, False)])
def test_folders_of_tensorstore_are_read(tmp_path, scan, pointer):
    net, flat = make("tok")
    flat["head/kernel"] = np.zeros_like(flat["head/kernel"])
    stored = under("params", scanned(flat) if scan else flat)
    stored["opt/0/mu/head/kernel"] = jnp.ones((3, 3))
    path = tmp_path / "checkpoint.bv"
    save_as_big_vision(tmp_path / "checkpoint.bv-000000030" if pointer else path, stored)
    if pointer:
        (tmp_path / "checkpoint.bv-LAST").write_text("000000030\n")
    weights = open_weights(path)
    assert vit.Model(weights.description.num_outputs, **weights.description.fields) == net
    assert_trees_equal(weights.tree(), tree_of(flat))
    init = jax.tree.map(np.zeros_like, unflatten_dict(flat, sep="/"))
    assert_trees_equal(vit.load(init, str(path), {}), tree_of(flat))


def test_a_folder_of_tensorstore_with_a_description_is_read(tmp_path):
    """dcvit 0.2.0 wrote such folders."""
    net, flat = make("gap", qk_norm="rmsnorm")
    description = Description("vit", 5, {**SMALL, "pool_type": "gap", "qk_norm": "rmsnorm"})
    save_as_big_vision(path := tmp_path / "checkpoint.bv", under("params", flat))
    (path / "config.json").write_text(json.dumps(FAMILIES["own"].config(description)))
    weights = open_weights(path / ".." / path.name)
    assert (weights.family, build(weights.description)) == ("own", net)
    assert_trees_equal(weights.tree(), tree_of(flat))


FIELDS = [
    {},
    {"registers": 2, "layer_scale": 1e-5, "mlp": "swiglu", "rep_size": True, "posemb": "sincos2d"},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_fields_are_told_by_the_tensors_which_are_written_bit_for_bit(tmp_path, fields):
    net, flat = make(**{"pool": "gap", **{("pool" if k == "pool_type" else k): v for k, v in fields.items()}})
    description = Description("vit", 5, {**SMALL, "pool_type": net.pool_type, **fields})
    arrays = {path: Tensor(x.shape, lambda x=x: np.asarray(x)) for path, x in flat.items()}
    np.savez(tmp_path / "model.npz", **dict(linking.write(FAMILIES["big_vision"].links(description), arrays)))
    weights = open_weights(tmp_path / "model.npz")
    assert vit.Model(5, **weights.description.fields) == net
    assert_trees_equal(weights.tree(), tree_of(flat))


@pytest.mark.parametrize("fields", [{"qk_norm": "rmsnorm"}, {"compose": "both"}])
def test_kind_of_attention_is_not_guessed(tmp_path, fields):
    np.savez(tmp_path / "model.npz", **make("gap", **fields)[1])
    with pytest.raises(CheckpointError, match="do not tell how attention is composed, or whether qk_norm is"):
        open_weights(tmp_path / "model.npz")


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["params", "augreg", "bare"])
def test_logits_equal_those_of_timms_reader_of_big_vision(tmp_path, layout):
    timm = pytest.importorskip("timm", reason="needs timm; pip install -e .[interop]")
    from vision_models import check_read, of_torch

    pool = LAYOUTS[layout][0]
    _, flat = make(pool, mlp_dim=128)
    path = write(tmp_path / "model.npz", layout, flat)
    theirs = timm.create_model(
        "vit_base_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5,
        act_layer="gelu_tanh", class_token=pool == "tok", fc_norm=False,
        global_pool={"gap": "avg", "tok": "token", "map": "map"}[pool],
    ).eval()  # fmt: skip
    theirs.load_pretrained(path)
    check_read(path, of_torch(theirs, PIXELS), PIXELS)


HEADS, RANK = 4, 2


def of_the_authors(seed=0):
    """Return random parameters of the authors' ViT: names and shapes as in their code."""
    rng = np.random.default_rng(seed)
    net, flat = make("gap", compose="both", static=True, qk_norm="layernorm", depth=1)
    found = {name: np.asarray(x) for name, x in flat.items() if "MultiHead" not in name}
    width, inner, at = 32, 4 * HEADS, "Transformer/encoderblock_0/MultiHeadDotProductAttention_0"
    shapes = {"dyn_w_proj/dw1": (width, 1, 4, inner), "dyn_w_proj/qkw": (1, 4, inner, 2 * RANK, HEADS),
              "dyn_w_proj/dd": (width, 1, 4 * HEADS), "pre_proj/w": (1, HEADS, HEADS),
              "post_proj/w": (1, HEADS, HEADS), "query_ln/scale": (8,), "key_ln/scale": (8,),
              "o_dense/kernel": (HEADS, 8, width), "o_dense/bias": (width,)}  # fmt: skip
    for name in ("query", "key", "value"):
        shapes |= {f"{name}_dense/kernel": (width, HEADS, 8), f"{name}_dense/bias": (HEADS, 8)}
    for name, shape in shapes.items():
        found[f"{at}/{name}"] = (name.endswith("scale") + 0.3 * rng.normal(size=shape)).astype(np.float32)
    return net, found, at


def attention_of_the_authors(x, params):
    """Compute their attention in float64: their projections, then the equations of the paper."""
    p = {name: np.float64(value) for name, value in params.items()}
    q, k, v = (np.einsum("btm,mhd->bthd", x, p[f"{name}_dense/kernel"]) + p[f"{name}_dense/bias"]
               for name in ("query", "key", "value"))  # fmt: skip
    q, k = (lm_oracle.normalize(y, {"scale": p[f"{name}_ln/scale"], "bias": 0.0}, 1e-6)
            for name, y in (("query", q), ("key", k)))  # fmt: skip
    hidden = lm_oracle.ACTIVATIONS["gelu_tanh"](np.einsum("btm,mck->btck", x, p["dyn_w_proj/dw1"][:, 0]))
    both = np.einsum("btck,ckih->btcih", hidden, p["dyn_w_proj/qkw"][0])
    down, up = both[..., :RANK, :], both[..., RANK:, :]
    down = lm_oracle.normalize(down, {"scale": 1.0}, 1e-6)
    gate = np.tanh(x @ p["dyn_w_proj/dd"][:, 0]).reshape(*x.shape[:2], 4, HEADS)

    def weights(first, static):
        sides = {f"{side}{end}": y[:, :, first + i]
                 for i, side in enumerate("qk") for end, y in (("1", down), ("2", up), ("g", gate))}  # fmt: skip
        return {**sides, "static": static}

    out = oracle.attention(q, k, v, weights(0, p["pre_proj/w"]), weights(2, p["post_proj/w"]))
    return np.einsum("bthd,hdm->btm", out, p["o_dense/kernel"]) + p["o_dense/bias"]


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["parameters", "kernels", "matrices"])
def test_attention_of_the_authors_vit_equals_the_equations(tmp_path, stored):
    """The dynamic weights are parameters of `dyn_w_proj`, or kernels of its modules; projections may be matrices."""
    net, flat, at = of_the_authors()
    inside = {name.removeprefix(f"{at}/"): x for name, x in flat.items() if name.startswith(at)}
    if stored == "kernels":
        for name in ("dw1", "dd"):
            flat[f"{at}/dyn_w_proj/{name}/kernel"] = flat.pop(f"{at}/dyn_w_proj/{name}")
    file = dict(flat)
    if stored == "matrices":
        file |= {name: x.reshape(32, 32) for name, x in flat.items() if name.endswith("_dense/kernel")}
    np.savez(tmp_path / "model.npz", **under("params", file))
    weights = open_weights(tmp_path / "model.npz")
    assert weights.family == "dcmha_vit"
    assert vit.Model(5, **weights.description.fields) == net
    params = jax.tree.map(jnp.asarray, weights.tree())
    out = outputs_of(net)(params, jnp.asarray(PIXELS))
    norm = {name: np.float64(flat[f"Transformer/encoderblock_0/LayerNorm_0/{name}"]) for name in ("scale", "bias")}
    expected = attention_of_the_authors(lm_oracle.normalize(np.float64(out["with_posemb"]), norm, 1e-6), inside)
    assert expected.std() > 0.3
    np.testing.assert_allclose(out["encoder"]["block00"]["sa"], expected, rtol=0, atol=2e-5 * expected.std())
    assert_trees_equal(written_back(weights), flat)
