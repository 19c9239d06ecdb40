"""Pythia, Transformer and Transformer++ have the logits of Hugging Face's GPT-NeoX, GPT-2 and LLaMA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.models import lm

torch = pytest.importorskip("torch", reason="needs PyTorch; pip install -e .[interop]")
transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers; pip install -e .[interop]")

VOCAB, WIDTH, HEADS, DEPTH, MLP, LENGTH = 61, 48, 6, 3, 80, 40
SHAPE = dict(width=WIDTH, depth=DEPTH, num_heads=HEADS, mlp_dim=MLP, context=LENGTH)
SIZES = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=MLP,
    max_position_embeddings=LENGTH, tie_word_embeddings=False, use_cache=False,
)  # fmt: skip


def rotary(base, fraction=1.0):
    return {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction}


def with_random_weights(model):
    """Set every parameter to random values and return the model with its parameters by name."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if ("norm" in name or ".ln_" in name) and name.endswith("weight") else 0.0
            parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    if not model.config.tie_word_embeddings:  # its name depends on the model and the release
        weights["head.weight"] = model.get_output_embeddings().weight.detach().numpy()
    return model.eval().float(), weights


def dense(weights, name, *axes):
    """Convert a linear layer of torch to flax: the kernel is transposed, its outputs are split into `axes`."""
    fields = {"kernel": weights[f"{name}.weight"].T}
    if f"{name}.bias" in weights:
        fields["bias"] = weights[f"{name}.bias"]
    return {key: x.reshape(*x.shape[:-1], *axes) if axes else x for key, x in fields.items()}


def norm(weights, name):
    fields = {"scale": weights[f"{name}.weight"]}
    return fields | ({"bias": weights[f"{name}.bias"]} if f"{name}.bias" in weights else {})


def joined(kernel, heads):
    """Reshape an output projection with H·D inputs to H D M."""
    return {**kernel, "kernel": kernel["kernel"].reshape(heads, -1, kernel["kernel"].shape[-1])}


def from_neox(weights):
    """Convert the weights of GPTNeoXForCausalLM, whose fused projection has a query, key and value for each head."""
    layers = {}
    for i in range(DEPTH):
        at = f"gpt_neox.layers.{i}"
        fused = dense(weights, f"{at}.attention.query_key_value", HEADS, 3, WIDTH // HEADS)
        attention = {
            name: {key: x[..., j, :] for key, x in fused.items()} for j, name in enumerate(("query", "key", "value"))
        }
        attention["out"] = joined(dense(weights, f"{at}.attention.dense"), HEADS)
        layers[f"decoderblock_{i}"] = {
            "attention_norm": norm(weights, f"{at}.input_layernorm"),
            "MultiHeadDotProductAttention_0": attention,
            "mlp_norm": norm(weights, f"{at}.post_attention_layernorm"),
            "MlpBlock_0": {
                "in": dense(weights, f"{at}.mlp.dense_h_to_4h"),
                "out": dense(weights, f"{at}.mlp.dense_4h_to_h"),
            },
        }
    return {
        "embedding": {"embedding": weights["gpt_neox.embed_in.weight"]},
        "Transformer": layers | {"decoder_norm": norm(weights, "gpt_neox.final_layer_norm")},
        "head": dense(weights, "head"),
    }


def from_llama(weights):
    """Convert the weights of LlamaForCausalLM."""
    layers = {}
    for i in range(DEPTH):
        at = f"model.layers.{i}"
        attention = {
            name: dense(weights, f"{at}.self_attn.{name[0]}_proj", -1, WIDTH // HEADS)
            for name in ("query", "key", "value")
        }
        layers[f"decoderblock_{i}"] = {
            "attention_norm": norm(weights, f"{at}.input_layernorm"),
            "MultiHeadDotProductAttention_0": attention
            | {"out": joined(dense(weights, f"{at}.self_attn.o_proj"), HEADS)},
            "mlp_norm": norm(weights, f"{at}.post_attention_layernorm"),
            "MlpBlock_0": {
                ours: dense(weights, f"{at}.mlp.{theirs}_proj")
                for ours, theirs in (("in", "gate"), ("gate", "up"), ("out", "down"))
            },
        }
    return {
        "embedding": {"embedding": weights["model.embed_tokens.weight"]},
        "Transformer": layers | {"decoder_norm": norm(weights, "model.norm")},
    } | ({"head": dense(weights, "head")} if "head.weight" in weights else {})


def from_gpt2(weights):
    """Convert the weights of GPT2LMHeadModel, whose kernels are not transposed; one kernel has q, k and v."""
    weights = {name: x.T if x.ndim == 2 and ".c_" in name else x for name, x in weights.items()}
    layers = {}
    for i in range(DEPTH):
        at = f"transformer.h.{i}"
        fused = dense(weights, f"{at}.attn.c_attn", 3, HEADS, WIDTH // HEADS)
        attention = {
            name: {key: x[..., j, :, :] for key, x in fused.items()} for j, name in enumerate(("query", "key", "value"))
        }
        layers[f"decoderblock_{i}"] = {
            "attention_norm": norm(weights, f"{at}.ln_1"),
            "MultiHeadDotProductAttention_0": attention | {"out": joined(dense(weights, f"{at}.attn.c_proj"), HEADS)},
            "mlp_norm": norm(weights, f"{at}.ln_2"),
            "MlpBlock_0": {"in": dense(weights, f"{at}.mlp.c_fc"), "out": dense(weights, f"{at}.mlp.c_proj")},
        }
    return {
        "embedding": {"embedding": weights["transformer.wte.weight"]},
        "pos_embedding": weights["transformer.wpe.weight"],
        "Transformer": layers | {"decoder_norm": norm(weights, "transformer.ln_f")},
        "head": dense(weights, "head"),
    }


def difference(theirs, net, params):
    """Return the largest difference of the logits of random tokens, after checking the shapes of the parameters."""
    expected = jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), jnp.int32))["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    tokens = np.random.default_rng(1).integers(VOCAB, size=(2, LENGTH)).astype(np.int32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert logits.dtype == np.float32
    assert logits.std() > 1
    largest = np.abs(jax.jit(net.apply)({"params": params}, tokens)[0] - logits).max()
    print(f"largest difference {largest:.1e} of logits up to {np.abs(logits).max():.1f}")
    return largest


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_pythia_equals_gpt_neox(fraction, parallel):
    config = transformers.GPTNeoXConfig(
        **SIZES, hidden_act="gelu", use_parallel_residual=parallel, layer_norm_eps=1e-5, attention_bias=True,
        rope_parameters=rotary(10_000.0, fraction),
    )  # fmt: skip
    theirs, weights = with_random_weights(transformers.GPTNeoXForCausalLM(config))
    net = lm.Model(VOCAB, preset="Pythia-2.8B", **SHAPE, rotary_fraction=fraction, parallel=parallel)
    assert difference(theirs, net, from_neox(weights)) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("key_heads", "base"), [(6, 10_000.0), (2, 10_000.0), (1, 500_000.0)])
def test_transformer_plus_plus_equals_llama_also_with_grouped_queries(key_heads, base, tied):
    config = transformers.LlamaConfig(
        **{**SIZES, "tie_word_embeddings": tied}, hidden_act="silu", num_key_value_heads=key_heads, rms_norm_eps=1e-6,
        rope_parameters=rotary(base),
    )  # fmt: skip
    theirs, weights = with_random_weights(transformers.LlamaForCausalLM(config))
    net = lm.Model(VOCAB, preset="Transformer++-6.9B", **SHAPE, num_key_heads=key_heads, rotary_base=base, tied=tied)
    assert difference(theirs, net, from_llama(weights)) < 1e-4


def test_transformer_equals_gpt_2_with_an_untied_head():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_inner=MLP, n_positions=LENGTH,
        activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=False, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs, weights = with_random_weights(transformers.GPT2LMHeadModel(config))
    net = lm.Model(VOCAB, preset="Transformer-405M", **SHAPE)
    assert difference(theirs, net, from_gpt2(weights)) < 1e-4
