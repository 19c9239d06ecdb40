"""Orbax checkpoints of the authors' JAX code: the same model as their equations, and damaged ones are errors."""

import json

import dcformer_oracle as oracle
import flax.traverse_util
import numpy as np
import orbax.checkpoint as ocp
import pytest
from foreign_models import largest_difference, libraries, our_logits, random_tokens

from dcvit.errors import CheckpointError
from dcvit.weights import links
from dcvit.weights.families import open_weights

pytestmark = pytest.mark.interop  # their parameters are random tensors of PyTorch
CONFIG = {
    "model_type": "dcformer", "vocab_size": 61, "dim": 32, "n_head": 4, "intermediate_size": 44, "use_qk_norm": True,
    "window_type": "LG", "window_size": 256, "n_layer": 4, "norm_eps": 1e-5, "qk_epsilon": 1e-5, "rope_base": 10_000,
    "compose_gelu": "tanh",
}  # fmt: skip
WIDTH, HEADS = CONFIG["dim"], CONFIG["n_head"]


def heads_of(kernel):
    return kernel.T.reshape(WIDTH, HEADS, -1)


def their_tree(state, period, static):
    """The tree of a training state, from tensors by the names of their PyTorch code."""
    state = {name: np.asarray(x) for name, x in state.items()}
    layers = {}
    for sublayer in range(period):
        rows = []
        for i in range(sublayer, CONFIG["n_layer"], period):
            at = f"layers.{i}.attention"
            q, k, v = np.split(state[f"{at}.wqkv.weight"], 3)
            op = {f"dyn_w_proj/{n}/kernel": state[f"{at}.dyn_w_proj.{n}"] for n in ("dw1", "dd")}
            op["dyn_w_proj/qkw"] = state[f"{at}.dyn_w_proj.qkw"]
            if static:
                op |= {f"{n}_proj/w": state[f"{at}.{n}.w_b"] for n in ("pre", "post")}
            attention = {f"{n}/kernel": heads_of(x) for n, x in (("query", q), ("key", k), ("value", v))}
            attention["out/kernel"] = state[f"{at}.wo.weight"].T.reshape(HEADS, -1, WIDTH)
            attention |= {f"{n}_norm/scale": state[f"{at}.{n}_norm.scale"] for n in "qk" if CONFIG["use_qk_norm"]}
            attention |= {f"AttentionOp_0/{n}": x for n, x in op.items()}
            mlp = {f"{n}/kernel": state[f"layers.{i}.feed_forward.{w}.weight"].T
                   for n, w in (("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2"))}  # fmt: skip
            row = {f"self_attention_{sublayer}/{n}": x for n, x in attention.items()}
            row |= {f"mlp_{sublayer}/{n}": x for n, x in mlp.items()}
            row[f"pre_self_attention_layer_norm_{sublayer}/scale"] = state[f"layers.{i}.attention_norm.weight"]
            row[f"post_self_attention_layer_norm_{sublayer}/scale"] = state[f"layers.{i}.ffn_norm.weight"]
            rows.append(row)
        layers |= {name: np.stack([row[name] for row in rows], axis=1) for name in rows[0]}
    params = {f"decoder/layers/{name}": x for name, x in layers.items()} | {
        "decoder/decoder_norm/scale": state["norm.weight"],
        "decoder/logits_dense/kernel": state["output.weight"].T,
        "token_embedder/embedding": state["tok_embeddings.weight"],
    }
    return flax.traverse_util.unflatten_dict({k: np.array(x) for k, x in params.items()}, sep="/")


def save(folder, params, *, database=False, root="params"):
    """Save a training state as their trainer does, with an optimizer's state."""
    state = {"step": np.int32(7), "params": params, "opt_state": {"mu": {"x": np.ones(3)}}}
    if root == "params/params":
        state["params"] = {"params": params}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=database)).save(folder, state)
    return folder


def random_tree(period=2, static=False):
    torch, _ = libraries()
    state = oracle.random_state(torch, CONFIG)
    if static:
        generator = torch.Generator().manual_seed(5)
        for i in range(CONFIG["n_layer"]):
            for where in ("pre", "post"):
                state[f"layers.{i}.attention.{where}.w_b"] = 0.1 * torch.randn((1, HEADS, HEADS), generator=generator)
    return state, their_tree(state, period, static)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "period", "static", "database", "root", "item"),
    [
        ("LG", 2, False, False, "params", "state"),
        ("LGLL", 4, True, True, "params/params", ""),
    ],
)
def test_both_directions_keep_logits_and_every_bit(pattern, period, static, database, root, item, tmp_path):
    torch, _ = libraries()
    state, params = random_tree(period, static)
    save(tmp_path / "7" / item, params, database=database, root=root)
    weights = open_weights(tmp_path / "7")
    assert weights.family == "maxtext"
    tokens = random_tokens(61, 262, batch=1)
    expected = oracle.forward(torch, {**CONFIG, "window_type": pattern}, state, tokens, prompt=0)
    difference = largest_difference(our_logits(weights, tokens), expected)
    print(f"MaxText {pattern}: largest difference {difference:.1e}")
    assert difference < 2e-5

    written = dict(links.write(weights.links, weights.parameters()))
    flat = flax.traverse_util.flatten_dict(params, sep=".")
    assert written.keys() == {f"{root.replace('/', '.')}.{name}" for name in flat}
    for name, array in flat.items():
        found = written[f"{root.replace('/', '.')}.{name}"]
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def remove(folder, name):
    for file in (folder / f"params.{name}").iterdir():
        if file.name != ".zarray":
            file.unlink()


def overwrite(folder, name):
    (folder / f"params.{name}" / ".zarray").write_text("{")


def enlarge_chunks(folder, name):
    file = folder / f"params.{name}" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chunks": [10**15]}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: remove(f, "decoder.decoder_norm.scale"), "cannot read params.decoder.decoder_norm.scale"),
        (lambda f: overwrite(f, "decoder.decoder_norm.scale"), "is damaged"),
        (lambda f: enlarge_chunks(f, "decoder.decoder_norm.scale"), "of shape (1000000000000000,), more than"),
    ],
    ids=["missing data", "invalid array", "huge chunks"],
)
def test_a_damaged_checkpoint_is_never_read_as_zeros(damage, message, tmp_path):
    folder = save(tmp_path / "7", random_tree()[1])
    damage(folder)
    with pytest.raises(CheckpointError) as raised:
        open_weights(folder).tree()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def change(name, value):
    def changed(flat):
        flat = {k: x for k, x in flat.items() if k != name}
        return flat if value is None else {**flat, name: value}

    return changed


LAYERS = "decoder/layers"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change("decoder/logits_dense/kernel", None), "1 only in the model: params.decoder.logits_dense.kernel"),
        (change(f"{LAYERS}/mlp_0/wi_2/kernel", np.ones((2, 2))), "1 only in the file: params.decoder.layers.mlp_0.w"),
        (change(f"{LAYERS}/self_attention_2/query/kernel", np.ones((2, 2))), "blocks of 3 layers are not supported"),
        (change(f"{LAYERS}/self_attention_0/query/kernel", np.ones((32, 2, 4, 16))), "4 heads of width 16 are not"),
        (change(f"{LAYERS}/mlp_0/wi_0/kernel", np.ones((32, 44))), "wi_0.kernel has shape (32, 44), expected 3 dim"),
        (change(f"{LAYERS}/mlp_1/wi_0/kernel", np.ones((32, 3, 44))), "mlp_1.wi_0.kernel (file (32, 3, 44), model"),
        (change(f"{LAYERS}/self_attention_0/AttentionOp_0/dyn_w_proj/qkw", None), "tensors are those of no known mod"),
    ],
)  # fmt: skip
def test_an_unsuitable_checkpoint_is_refused_in_one_line(changed, message, tmp_path):
    flat = changed(flax.traverse_util.flatten_dict(random_tree()[1], sep="/"))
    folder = save(tmp_path / "7", flax.traverse_util.unflatten_dict(flat, sep="/"))
    with pytest.raises(CheckpointError) as raised:
        open_weights(folder).tree()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
