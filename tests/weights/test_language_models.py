"""GPT-2, the LLaMA family and GPT-NeoX: files of transformers give its logits, and files of ours give them to it."""

import dataclasses
import json

import dcformer_oracle as oracle
import jax
import numpy as np
import pytest
from foreign_models import (
    assert_same_bits,
    export,
    largest_difference,
    libraries,
    our_logits,
    random_tokens,
    tensors_of,
    with_random_weights,
    written_back,
)
from language_models import complete
from marks import mostly_exhaustive
from refusals import refused
from small_models import assert_trees_equal

from dcvit.errors import CheckpointError
from dcvit.inference import generation
from dcvit.inference.sampling import Sampling
from dcvit.models import lm
from dcvit.weights import lm_families
from dcvit.weights.families import FAMILIES, open_weights
from dcvit.weights.family import Description
from dcvit.weights.tensors import open_file

VOCAB, WIDTH, HEADS, DEPTH, MLP, LENGTH = 61, 48, 6, 3, 80, 40
SIZES = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=MLP,
    max_position_embeddings=LENGTH, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
GPT2 = dict(
    vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_inner=MLP, n_positions=LENGTH, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip


LOCAL = "sliding_attention"
WINDOWS = dict(use_sliding_window=True, sliding_window=7)
ORIGINAL = "original_max_position_embeddings"
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 32}


def rope(base=10_000.0, **others):
    return dict(rope_parameters={"rope_type": "default", "rope_theta": base, **others})


def neox(fraction, **others):
    return "GPTNeoX", SIZES | rope(partial_rotary_factor=fraction) | others


def llama(key_heads, base=10_000.0, scaling=None, **others):
    return "Llama", SIZES | rope(base, **scaling or {}) | dict(num_key_value_heads=key_heads) | others


QWEN3 = SIZES | rope() | dict(num_key_value_heads=2, head_dim=WIDTH // HEADS, rms_norm_eps=1e-3)
MODELS = {
    "gpt2 tied": ("GPT2", GPT2),
    "gpt2 untied": ("GPT2", GPT2 | dict(tie_word_embeddings=False, n_inner=None, activation_function="gelu")),
    "neox parallel .25": neox(0.25),
    "neox parallel .5": neox(0.5, layer_norm_eps=1e-3, hidden_act="gelu_new"),
    "neox sequential .5 tied": neox(0.5, use_parallel_residual=False, tie_word_embeddings=True),
    "neox linear rope": ("GPTNeoX", SIZES | rope(partial_rotary_factor=0.5, rope_type="linear", factor=3.0)),
    "llama": llama(6),
    "llama grouped": llama(2),
    "llama grouped tied": llama(2, tie_word_embeddings=True),
    "llama one key head": llama(1, 500_000.0, rms_norm_eps=1e-3),
    "llama tied, biases": llama(6, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama rope of LLaMA 3": llama(2, 50.0, scaling=LLAMA_3),
    "mistral": ("Mistral", SIZES | rope() | dict(num_key_value_heads=2, sliding_window=None)),
    "mistral windows": ("Mistral", SIZES | rope() | dict(num_key_value_heads=2, sliding_window=7)),
    "qwen2 tied": ("Qwen2", SIZES | rope() | dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2 windows": ("Qwen2", SIZES | rope() | WINDOWS | dict(num_key_value_heads=2, max_window_layers=0)),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3 some windows": ("Qwen3", QWEN3 | WINDOWS | dict(layer_types=[LOCAL, "full_attention", LOCAL])),
}
CAUSAL = {"GPT2": "GPT2LMHeadModel"}


def random_model(name):
    _, transformers = libraries()
    kind, config = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**config)
    return with_random_weights(getattr(transformers, CAUSAL.get(kind, f"{kind}ForCausalLM"))(config))


def their_logits(model, tokens):
    torch, _ = libraries()
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(
    MODELS, "gpt2 tied", "neox parallel .25", "neox sequential .5 tied", "llama grouped tied", "llama rope of LLaMA 3",
    "mistral windows", "qwen2 windows", "qwen3 some windows",
))  # fmt: skip
def test_both_directions_keep_logits_and_every_bit(name, tmp_path):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    weights = open_weights(tmp_path / "theirs")

    tokens = random_tokens(VOCAB, LENGTH)
    expected = their_logits(theirs, tokens)
    assert largest_difference(our_logits(weights, tokens), expected) < 2e-5

    export(weights, tmp_path / "ours", max_shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    original = {name: tensor.read() for name, tensor in tensors_of(weights).items()}
    assert_same_bits(open_file(tmp_path / "ours").tensors, original)

    again = libraries()[1].AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    np.testing.assert_array_equal(their_logits(again.eval(), tokens), expected)


@pytest.mark.interop
@pytest.mark.slow
def test_shards_of_safetensors_and_of_pytorch_hold_the_same_model(tmp_path):
    torch, _ = libraries()
    random_model("gpt2 tied").save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    expected = open_weights(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (folder := tmp_path / "bin").mkdir()
    (folder / "config.json").write_bytes((tmp_path / "shards" / "config.json").read_bytes())
    state = {name: torch.from_numpy(tensor.read()) for name, tensor in tensors_of(expected).items()}
    index = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(sorted(state))}
    for file in set(index.values()):
        torch.save({name: state[name] for name in state if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    found = open_weights(folder)
    assert found.description == expected.description
    assert_trees_equal(dict(found.read()), dict(expected.read()))


def rewrite(folder, change=lambda tensors: tensors, **config):
    """Change the tensors and properties of a folder with one file; a property None is removed."""
    from safetensors.numpy import load_file, save_file

    old = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in old.items() if v != "absent"}))
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def saved(tmp_path):
    """Save a model and return its folder."""

    def save(name):
        random_model(name).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return save


@pytest.mark.interop
@pytest.mark.slow
def test_first_releases_of_gpt_2_have_no_prefix_and_buffers_that_are_not_parameters(saved):
    folder = saved("gpt2 tied")
    expected = dict(open_weights(folder).read())

    def old(tensors):
        tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
        for i in range(DEPTH):
            tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, LENGTH, LENGTH), np.float32))
            tensors[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
        return tensors

    rewrite(folder, old, tie_word_embeddings="absent")
    found = open_weights(folder)
    assert_trees_equal(dict(found.read()), expected)
    buffers = {f"h.{i}.attn.{name}" for i in range(DEPTH) for name in ("bias", "masked_bias")}
    assert tensors_of(found).keys() - buffers == written_back(found).keys()


@pytest.mark.interop
@pytest.mark.slow
def test_a_tied_head_may_be_in_the_file_as_an_equal_copy(saved):
    folder = saved("llama grouped tied")
    rewrite(folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].copy()})
    weights = open_weights(folder)
    assert "head/kernel" not in weights.params
    assert written_back(weights).keys() == tensors_of(weights).keys()
    rewrite(folder, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        open_weights(folder).tree()


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral windows", "qwen3 some windows"])
def test_generation_beyond_the_window_gives_the_tokens_of_transformers(name, saved):
    """The prompt is longer than the window of 7 tokens, and so are the new tokens."""
    torch, transformers = libraries()
    folder = saved(name)
    weights = open_weights(folder)
    prompts = random_tokens(VOCAB, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    options = dict(max_new_tokens=LENGTH - 12, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = theirs.generate(torch.from_numpy(prompts).long(), **options)[:, 12:].tolist()
    net = lm.Model(VOCAB, **weights.description.fields)
    greedy = generation.Options(LENGTH - 12, sampling=Sampling(temperature=0.0))
    found = complete(net, weights.tree(), prompts.tolist(), greedy)
    assert found == expected
    assert len({token for row in expected for token in row}) > 5


LLAMA, NEOX = "llama one key head", "neox parallel .5"
BUFFERS = {
    LLAMA: "model.layers.0.self_attn.rotary_emb.inv_freq",
    NEOX: "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
}


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        (LLAMA, dict(rope_theta=500_000.0, rope_scaling=None, rope_parameters="absent")),
        (NEOX, dict(rotary_pct=0.5, rotary_emb_base=10_000, rope_parameters="absent")),
        (LLAMA, dict(rope_scaling=LLAMA_3, rope_theta=50.0, rope_parameters="absent")),
        (LLAMA, dict(rope_scaling={"type": "linear", "factor": 3})),  # the base is the default, for any rope_parameters
        (LLAMA, dict(rope_scaling={k: v for k, v in LLAMA_3.items() if k != ORIGINAL})),  # for the context, 40
        (LLAMA, dict(rope_parameters=LLAMA_3, **{ORIGINAL: 16})),
    ],
)
def test_rotary_frequencies_are_those_of_transformers_in_every_form_of_the_config(name, config, saved):
    """Also in files of releases before 5, whose frequencies are a buffer."""
    folder = saved(name)
    rewrite(folder, **config)
    tokens = random_tokens(VOCAB, LENGTH)
    expected = their_logits(libraries()[1].AutoModelForCausalLM.from_pretrained(folder).eval(), tokens)
    rewrite(folder, lambda t: {**t, BUFFERS[name]: np.ones(4, np.float32)})
    assert largest_difference(our_logits(open_weights(folder), tokens), expected) < 2e-5


BIAS = "gpt_neox.layers.1.attention.query_key_value.bias"
# The model, tensors of other shapes, the change of its config.json, and a part of the message.
UNSUITABLE = [
    ("llama", [], dict(model_type="gemma"), "model_type='gemma' is not supported; supported: llama, mistral, qw"),
    ("llama", [], dict(num_hidden_layers=4), "9 only in the model: model.layers.3.input_layernorm.weight"),
    ("mistral", [], dict(layer_types=[LOCAL] * DEPTH), "only ['full_attention', 'full_attention', 'full_attention']"),
    ("llama", [], dict(is_causal=False), "is_causal=False is not supported, only True"),
    ("llama", [], dict(rope_parameters={LOCAL: {"rope_theta": 9.0}}), f"for each kind of layer ({LOCAL}) are not supp"),
    ("neox parallel .5", [BIAS], {}, f"1 of another shape: {BIAS} (checkpoint (3, 5), model (144,))"),
]


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize(("name", "reshaped", "config", "message"), UNSUITABLE)
def test_an_unsuitable_file_is_refused_in_one_line_that_names_the_reason(name, reshaped, config, message, saved):
    folder = saved(name)
    rewrite(folder, lambda tensors: tensors | dict.fromkeys(reshaped, np.zeros((3, 5), np.float32)), **config)
    with refused(CheckpointError, message) as raised:
        open_weights(folder)
    assert str(raised.value).startswith(str(folder))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", dict(position="learned", norm="layernorm", mlp="gelu", use_bias=True, parallel=True),
         "GPT2LMHeadModel cannot express parallel=True (only False)"),
        ("llama", dict(compose="both"), "LlamaForCausalLM cannot express compose='both' (only None)"),
        ("dcformer", dict(compose="both"), "compose_gelu='tanh' (only 'exact')"),
        ("dcformer", dict(compose="both", compose_gelu="exact", compose_window=9), "compose_window=9 (only None)"),
        ("dcvit_hf", dict(compose="both", compose_window=9), "modeling_dcvit.py cannot express compose_window=9"),
    ],
)  # fmt: skip
def test_a_model_that_a_format_cannot_express_is_refused_by_the_names_of_its_fields(family, fields, message):
    with refused(CheckpointError, message):
        FAMILIES[family].config(Description("lm", 61, fields))


def test_the_fields_of_files_are_those_of_the_model():
    """A new field of the model must be a field of files too, or exports would lose it silently."""
    ours = {field.name for field in dataclasses.fields(lm.LM)} - {"parent", "name", "vocab_size", "compose_layers"}
    assert ours - set(lm_families.NOT_IN_FILES) == lm_families.DEFAULTS.keys()
    for family in ("llama", "gpt2", "gpt_neox", "dcformer", "dcvit_hf"):
        with pytest.raises(CheckpointError, match="compose_layers"):
            FAMILIES[family].config(Description("lm", 61, {"compose": "both", "compose_layers": (-1,)}))


DC_LENGTH = 20
SHARED = {
    "vocab_size": VOCAB, "dim": 32, "n_head": 4, "n_local_heads": 4, "head_dim": 8,
    "intermediate_size": 44, "block_size": 64, "use_dcmha": True, "query_wise": False, "is_training": False,
    "tie_word_embeddings": False, "use_qk_norm": True, "window_type": None, "window_size": 6,
}  # fmt: skip
DCFORMER = SHARED | {"model_type": "dcformer", "n_layer": 2, "norm_eps": 1e-6, "rope_base": 10_000}
DCPYTHIA = SHARED | {
    "model_type": "dcpythia", "n_layer": 2, "norm_eps": 1e-5, "rope_base": 10_000, "rotary_pct": 0.25,
    "use_linear_bias": True, "use_parallel_residual": True,
}  # fmt: skip
AUTHORS = {
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


def save_authors(folder, name, **changes):
    """Save a random model as the authors do, with buffers and copies, and return its tensors.

    Without `use_qk_norm` in its config, the file tells whether queries and keys are normalized.
    """
    torch, _ = libraries()
    config = AUTHORS[name]
    state = oracle.random_state(torch, config)
    copies = {
        f"layers.{i}.attention.dyn_w_proj.{end}": torch.ones(3)
        for i in range(config["n_layer"])
        for end in ("dw_m", "qkw_m", "pre_proj.w", "post_proj.w")
    }
    folder.mkdir()
    torch.save(state | copies, folder / "pytorch_model.bin")
    stored = {key: value for key, value in {**config, **changes}.items() if key != "use_qk_norm"}
    (folder / "config.json").write_text(json.dumps(stored))
    return state


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(AUTHORS, "DCPythia", "DCFormer", "DCFormer mgate", "DCFormer LGLL"))
def test_both_directions_of_the_authors_models_keep_logits_and_every_bit(name, tmp_path):
    torch, _ = libraries()
    state = save_authors(tmp_path / "theirs", name)
    weights = open_weights(tmp_path / "theirs")
    assert weights.family == "dcformer"
    tokens = random_tokens(VOCAB, 262 if AUTHORS[name]["window_type"] else DC_LENGTH, batch=1)
    expected = oracle.forward(torch, AUTHORS[name], state, tokens)
    assert largest_difference(our_logits(weights, tokens), expected) < 2e-5

    export(weights, tmp_path / "ours")
    assert_same_bits(open_file(tmp_path / "ours").tensors, {key: x.numpy() for key, x in state.items()})
    config = lm_families.DCFORMER.config(weights.description)
    assert open_weights(tmp_path / "ours").description == weights.description
    kept = {key: value for key, value in AUTHORS[name].items() if key in config}
    assert {key: config[key] for key in kept} == kept


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", ["DCPythia", "DCFormer"])
def test_decoding_has_the_smaller_window_that_their_cache_has(name, tmp_path):
    torch, _ = libraries()
    state = save_authors(tmp_path / "m", name)
    weights = open_weights(tmp_path / "m")
    net = lm.Model(VOCAB, **weights.description.fields)
    tokens, prompt = random_tokens(VOCAB, DC_LENGTH), 12
    params = weights.tree()
    apply = jax.jit(lambda params, tokens, cache: net.apply({"params": params}, tokens, cache=cache))
    logits, out = apply(params, tokens[:, :prompt], lm.init_cache(net, 2, DC_LENGTH))
    found = [logits]
    for t in range(prompt, DC_LENGTH):
        logits, out = apply(params, tokens[:, t : t + 1], out["cache"])
        found.append(logits)
    expected = oracle.forward(torch, AUTHORS[name], state, tokens, prompt)
    assert largest_difference(np.concatenate(found, axis=1), expected) < 2e-5


@pytest.mark.interop
@pytest.mark.slow
def test_an_unsuitable_config_of_the_authors_is_refused_by_name(tmp_path):
    save_authors(tmp_path / "m", "DCFormer", n_local_heads=-1, use_dcmha=False)
    with refused(CheckpointError, "use_dcmha=False is not supported, only True"):
        open_weights(tmp_path / "m")
