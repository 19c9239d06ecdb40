# ruff: noqa: E402
"""Vision models of transformers: the same logits or features when they are read; ViT and DeiT in both directions."""

import json

import numpy as np
import pytest
from refusals import refused

pytestmark = pytest.mark.interop
pytest.importorskip("torch", reason="needs PyTorch; pip install -e .[interop]")
transformers = pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")
import torch
from conversion_models import convert
from foreign_models import export, links_of, tensors_of
from marks import exhaustive, mostly_exhaustive
from safetensors.torch import save_file
from small_models import assert_trees_equal
from vision_models import TOLERANCE, check_read, check_written_back, images, of_torch, randomize

import dcvit
from dcvit.errors import CheckpointError, ConfigError
from dcvit.weights import families as weights

SMALL = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=32, patch_size=8)
HIDDEN = dict(intermediate_size=80)
CLASSES = dict(num_labels=5)
GATED = dict(use_gated_mlp=True, hidden_act="silu")
# Class of model, class of config and its fields; a model without classes returns features.
MODELS = {
    "ViT": ("ViTForImageClassification", "ViTConfig", {**HIDDEN, **CLASSES}),
    "ViT tanh": ("ViTForImageClassification", "ViTConfig", {**HIDDEN, **CLASSES, "hidden_act": "gelu_pytorch_tanh"}),
    "ViT, no biases": ("ViTForImageClassification", "ViTConfig", {**HIDDEN, **CLASSES, "qkv_bias": False}),
    "ViT features": ("ViTModel", "ViTConfig", {**HIDDEN, "pooler_output_size": 24}),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", {**HIDDEN, **CLASSES, "layer_norm_eps": 1e-3}),
    "DeiT, two heads": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {**HIDDEN, **CLASSES}),
    "DeiT, no biases": ("DeiTModel", "DeiTConfig", {**HIDDEN, "qkv_bias": False}),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", HIDDEN),
    "SigLIP classifier": ("SiglipForImageClassification", "SiglipConfig", CLASSES),
    "DINOv2": ("Dinov2Model", "Dinov2Config", {"mlp_ratio": 3}),
    "DINOv2 classifier": ("Dinov2ForImageClassification", "Dinov2Config", CLASSES),
    "DINOv2, no biases": ("Dinov2Model", "Dinov2Config", {"qkv_bias": False}),
    "DINOv2 registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 3}),
    "DINOv2 SwiGLU": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"use_swiglu_ffn": True}),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", {**HIDDEN, "num_register_tokens": 4}),
    "DINOv3 SwiGLU": ("DINOv3ViTModel", "DINOv3ViTConfig", {**HIDDEN, **GATED, "num_register_tokens": 4}),
    "DINOv3 7B": ("DINOv3ViTModel", "DINOv3ViTConfig", {**HIDDEN, **GATED, "query_bias": False, "value_bias": False}),
}
CLASS_TOKEN, POSITIONS = "embeddings.cls_token", "embeddings.position_embeddings"


def create(name):
    kind, config, fields = MODELS[name]
    fields = {"vision_config": {**SMALL, **HIDDEN}, **fields} if config == "SiglipConfig" else {**SMALL, **fields}
    return randomize(getattr(transformers, kind)(getattr(transformers, config)(**fields)))


def result(out):
    return out.logits if hasattr(out, "logits") else out.pooler_output


def sums_of(tensors):
    """Return the names of the tokens in front and of their position embeddings."""
    ends = (CLASS_TOKEN, "embeddings.distillation_token", "embeddings.register_tokens", POSITIONS)
    names = [name for end in ends for name in tensors if name.endswith(end)]
    return names if len(names) > 1 and names[-1].endswith(POSITIONS) else []


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(
    MODELS, "ViT", "ViT features", "DeiT, two heads", "SigLIP classifier", "DINOv2 registers", "DINOv2 SwiGLU",
    "DINOv3", "DINOv3 7B",
))  # fmt: skip
def test_results_equal_those_of_transformers_in_both_directions(tmp_path, name):
    model, pixels = create(name), images((32, 32))
    expected = of_torch(model, pixels, result)
    model.save_pretrained(tmp_path / "theirs")
    read = check_read(tmp_path / "theirs", expected, pixels)
    if read.family != "hf_vit":
        return
    check_written_back(read, sums_of(tensors_of(read)))
    folder = export(read, tmp_path / "ours")
    again, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    np.testing.assert_allclose(of_torch(again.eval(), pixels, result), expected, rtol=0, atol=TOLERANCE)
    assert_trees_equal(weights.open_weights(folder).tree(), read.tree())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeiT", "DINOv2 SwiGLU", "DINOv3"])
def test_names_of_release_5_in_memory_are_read(tmp_path, name):
    """A file of `model.state_dict()` has other names than one of `save_pretrained`."""
    model, pixels = create(name), images((32, 32))
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    read = check_read(tmp_path, of_torch(model, pixels, result), pixels)
    assert any(".attention.q_proj.weight" in link.theirs[0] for link in links_of(read))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SigLIP classifier", "DINOv2 SwiGLU", "DINOv3 7B"])
def test_a_family_that_is_read_only_is_exported_with_the_class_of_this_project(tmp_path, name):
    create(name).save_pretrained(tmp_path / "theirs")
    report = convert(tmp_path / "theirs", tmp_path / "ours", "hf")
    assert (report.source, report.result) == ("transformers", "transformers")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "dcvit"
    read, again = (weights.open_weights(tmp_path / side) for side in ("theirs", "ours"))
    assert_trees_equal(again.tree(), read.tree())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DINOv3", exhaustive("DINOv3 SwiGLU"), exhaustive("DINOv3 7B")])
def test_all_features_of_dinov3_equal_those_of_transformers_at_every_size(tmp_path, name):
    model = create(name)
    model.save_pretrained(tmp_path)
    found = dcvit.load(tmp_path)
    trained = model.config.image_size
    for size in ((trained, trained), (trained + 32, trained + 32), (trained, trained + 64)):
        pixels = images(size)
        for key, kind in (("encoded", "last_hidden_state"), ("pre_logits", "pooler_output")):
            expected = of_torch(model, pixels, lambda out, kind=kind: getattr(out, kind))
            difference = np.abs(found.features(pixels, key) - expected).max() / np.abs(expected).max()
            assert difference <= 2e-6
    with refused((ConfigError, CheckpointError), match="does not divide the image"):
        found.features(images((trained + 1, trained)))


@pytest.mark.slow
def test_vision_tower_is_read_from_a_model_of_both_towers(tmp_path):
    config = transformers.SiglipConfig(
        vision_config={**SMALL, **HIDDEN},
        text_config={**{k: v for k, v in SMALL.items() if "size" not in k or k == "hidden_size"}, **HIDDEN,
                     "vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2},
    )  # fmt: skip
    model, pixels = randomize(transformers.SiglipModel(config)), images((32, 32))
    model.save_pretrained(tmp_path)
    check_read(tmp_path, of_torch(model.vision_model, pixels, result), pixels)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "added"), [("probe", None), (None, "bias")])
def test_an_incomplete_or_larger_pooling_head_of_siglip_is_refused(tmp_path, lost, added):
    model = create("SigLIP")
    model.config.save_pretrained(tmp_path)
    tensors = {name: x for name, x in model.state_dict().items() if not lost or not name.endswith(f"head.{lost}")}
    more = {f"vision_model.head.{added}": torch.ones(3)} if added else {}
    save_file(tensors | more, tmp_path / "model.safetensors")
    with refused(CheckpointError, match=f"head.{lost or added}"):
        weights.open_weights(tmp_path)


@pytest.mark.slow
def test_siglip_without_a_pooling_head_has_no_pooling(tmp_path):
    model = create("SigLIP")
    model.config.save_pretrained(tmp_path)
    tensors = {name: x for name, x in model.state_dict().items() if "head." not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    pixels = images((32, 32))
    expected = of_torch(model, pixels, lambda out: out.last_hidden_state)
    np.testing.assert_allclose(dcvit.load(tmp_path).features(pixels, "encoded"), expected, rtol=0, atol=1e-5)


def original_dinov2(model):
    """Return the weights of a DINOv2 of transformers with the names of facebookresearch."""
    tensors, found = {k: v.clone() for k, v in model.state_dict().items()}, {}
    for name in list(tensors):
        if ".attention.q_proj." in name:
            parts = [tensors.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
            found[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
        elif ".mlp.gate_proj." in name:
            parts = [tensors.pop(name.replace("gate", part)) for part in ("gate", "up")]
            found[name.replace("gate_proj", "w12")] = torch.cat(parts)
    renamed = {
        "encoder.layer.": "blocks.", "attention.o_proj": "attn.proj", "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma", "mlp.down_proj": "mlp.w3", "embeddings.patch_embeddings.projection":
        "patch_embed.proj", "embeddings.position_embeddings": "pos_embed", "embeddings.": "", "layernorm": "norm",
    }  # fmt: skip
    for name, value in {**tensors, **found}.items():
        found.pop(name, None)
        for old, new in renamed.items():
            name = name.replace(old, new)
        found[name] = value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DINOv2", "DINOv2 SwiGLU"])
def test_names_of_facebookresearch_are_read_without_config(tmp_path, name):
    """Its code is not a package, so the expected features are those of transformers with the same tensors."""
    kind, config, fields = MODELS[name]
    fields = {**SMALL, **fields, "hidden_size": 128, "num_attention_heads": 2}
    model = randomize(getattr(transformers, kind)(getattr(transformers, config)(**fields)))
    torch.save(original_dinov2(model), tmp_path / "dinov2.pth")
    pixels = images((32, 32))
    check_read(tmp_path / "dinov2.pth", of_torch(model, pixels, result), pixels)
