"""The authors' DCFormer and DCPythia: their tensors give the logits of their equations, and come back bit by bit."""

import json

import dcformer_oracle as oracle
import jax
import numpy as np
import pytest
from foreign_models import assert_same_bits, export, largest_difference, libraries, our_logits, random_tokens
from refusals import refused

from dcvit.errors import CheckpointError
from dcvit.models import lm
from dcvit.weights.families import open_weights
from dcvit.weights.family import Description
from dcvit.weights.lm_families import DCFORMER as DCFORMER_FAMILY
from dcvit.weights.tensors import open_file

VOCAB, WIDTH, HEADS, WINDOW, LENGTH = 61, 32, 4, 6, 20
SHARED = {
    "vocab_size": VOCAB, "dim": WIDTH, "n_head": HEADS, "n_local_heads": HEADS, "head_dim": WIDTH // HEADS,
    "intermediate_size": 44, "block_size": 64, "use_dcmha": True, "query_wise": False, "is_training": False,
    "tie_word_embeddings": False, "use_qk_norm": True, "window_type": None, "window_size": WINDOW,
}  # fmt: skip
DCFORMER = SHARED | {"model_type": "dcformer", "n_layer": 2, "norm_eps": 1e-6, "rope_base": 10_000}
DCPYTHIA = SHARED | {
    "model_type": "dcpythia", "n_layer": 2, "norm_eps": 1e-5, "rope_base": 10_000, "rotary_pct": 0.25,
    "use_linear_bias": True, "use_parallel_residual": True,
}  # fmt: skip
MODELS = {
    "DCPythia": DCPYTHIA,
    "DCPythia sequential, no biases": DCPYTHIA
    | {"use_parallel_residual": False, "use_linear_bias": False, "rotary_pct": 0.5},
    "DCFormer": DCFORMER,
    "DCFormer-2.8B": DCFORMER | {"use_qk_norm": False},
    "DCFormer global": DCFORMER | {"window_size": None, "norm_eps": 1e-3},
    "DCFormer mgate": DCFORMER | {"mgate": True, "mgate_dim": 11, "rope_base": 500_000.0},
    "DCFormer LGLL": DCFORMER | {"window_type": "LGLL", "window_size": 256, "n_layer": 4},
    "DCFormer LGL6": DCFORMER | {"window_type": "LGL6", "window_size": 256, "n_layer": 8},
}


def save(folder, name, **changes):
    """Save a random model as the authors' `save_pretrained` does, with its buffers and copies; return its tensors."""
    torch, _ = libraries()
    config = MODELS[name]
    state = oracle.random_state(torch, config)
    copies = {
        f"layers.{i}.attention.dyn_w_proj.{end}": torch.ones(3)
        for i in range(config["n_layer"])
        for end in ("dw_m", "qkw_m", "pre_proj.w", "post_proj.w")
    }
    folder.mkdir()
    torch.save(state | copies, folder / "pytorch_model.bin")
    config = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return state


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_both_directions_keep_logits_and_every_bit(name, tmp_path):
    torch, _ = libraries()
    state = save(tmp_path / "theirs", name)
    weights = open_weights(tmp_path / "theirs")
    assert weights.family == "dcformer"
    tokens = random_tokens(VOCAB, 262 if MODELS[name]["window_type"] else LENGTH, batch=1)
    expected = oracle.forward(torch, MODELS[name], state, tokens)
    assert largest_difference(our_logits(weights, tokens), expected) < 2e-5

    export(weights, tmp_path / "ours")
    assert_same_bits(open_file(tmp_path / "ours").tensors, {key: x.numpy() for key, x in state.items()})
    config = DCFORMER_FAMILY.config(weights.description)
    assert open_weights(tmp_path / "ours").description == weights.description
    kept = {key: value for key, value in MODELS[name].items() if key in config}
    assert {key: config[key] for key in kept} == kept


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", ["DCPythia", "DCFormer"])
def test_decoding_has_the_smaller_window_that_their_cache_has(name, tmp_path):
    torch, _ = libraries()
    state = save(tmp_path / "m", name)
    weights = open_weights(tmp_path / "m")
    net = lm.Model(VOCAB, **weights.description.fields)
    tokens, prompt = random_tokens(VOCAB, LENGTH), 12
    params = weights.tree()
    apply = jax.jit(lambda params, tokens, cache: net.apply({"params": params}, tokens, cache=cache))
    logits, out = apply(params, tokens[:, :prompt], lm.init_cache(net, 2, LENGTH))
    found = [logits]
    for t in range(prompt, LENGTH):
        logits, out = apply(params, tokens[:, t : t + 1], out["cache"])
        found.append(logits)
    expected = oracle.forward(torch, MODELS[name], state, tokens, prompt)
    assert largest_difference(np.concatenate(found, axis=1), expected) < 2e-5


@pytest.mark.interop
@pytest.mark.slow
def test_qk_norm_is_told_by_the_file_if_its_config_does_not_tell(tmp_path):
    for name, expected in (("DCFormer", "rmsnorm"), ("DCFormer-2.8B", None)):
        save(tmp_path / name, name, use_qk_norm="absent")
        assert open_weights(tmp_path / name).description.fields.get("qk_norm") == expected


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(use_dcmha=False), "use_dcmha=False is not supported, only True"),
        (dict(use_qk_norm=False), "4 only in the checkpoint: layers.0.attention.q_norm.scale"),
    ],
)
def test_an_unsuitable_config_is_refused_by_name(config, message, tmp_path):
    save(tmp_path / "m", "DCFormer", **{"n_local_heads": -1, **config})
    with refused(CheckpointError, message):
        open_weights(tmp_path / "m")


def test_a_model_that_their_code_cannot_express_is_refused_by_the_names_of_its_fields():
    with refused(CheckpointError, "compose_gelu='tanh' (only 'exact')"):
        DCFORMER_FAMILY.config(Description("lm", 61, {"compose": "both"}))
