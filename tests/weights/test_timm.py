# ruff: noqa: E402
"""timm's Vision Transformers: the same logits, in both directions, and the same rules of fine-tuning."""

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.interop
timm = pytest.importorskip("timm", reason="needs timm; pip install -e .[interop]")
import torch
from foreign_models import export, links_of
from marks import mostly_exhaustive
from PIL import Image
from safetensors.torch import save_file
from small_models import assert_trees_equal
from timm.models._hub import save_for_hf
from timm.optim import param_groups_layer_decay
from timm.utils import ModelEmaV3
from vision_models import TOLERANCE, check_read, check_written_back, images, of_torch, randomize

from dcvit.errors import CheckpointError
from dcvit.models.input_channels import adapted
from dcvit.parallel.trees import by_name
from dcvit.training import step
from dcvit.training.optim import layer_scales
from dcvit.weights import families as weights
from dcvit.weights import links, timm_vit
from dcvit.weights.family import Description
from dcvit.weights.tensors import Tensor
from input_pipeline.preprocess.builder import Preprocess

SMALL = dict(img_size=32, embed_dim=48, depth=2, num_heads=3, num_classes=5)
ARCHITECTURES = {
    "vit_small_patch16_224": {},
    "deit_small_patch16_224": {"mlp_ratio": 2.5, "img_size": (32, 48)},
    "deit_small_distilled_patch16_224": {},
    "vit_base_patch16_clip_224": {"patch_size": 8},
    "vit_wee_patch16_reg1_gap_256": {"patch_size": 8, "fc_norm": None, "pre_norm": True},
    "deit3_small_patch16_224": {"qkv_bias": False},
    "vit_base_patch16_siglip_224": {"act_layer": "gelu_tanh"},
    "vit_small_patch14_reg4_dinov2": {"patch_size": 8},
    "vit_giant_patch14_dinov2": {"patch_size": 8},
    "vit_so150m_patch16_reg4_gap_256": {"patch_size": 8},
    "vit_base_patch16_siglip_gap_224": {},
    "vit_so150m_patch16_reg4_map_256": {"patch_size": 8, "class_token": True},
}
DIGITS = dict(mean=(0.48, 0.45, 0.4), std=(0.23, 0.22, 0.225), crop_pct=0.9, interpolation="bicubic")


def create(name, **fields):
    return randomize(timm.create_model(name, **{**SMALL, **ARCHITECTURES[name], **fields}))


def save(model, folder):
    """Save a model as timm does for the Hugging Face hub."""
    save_for_hf(model, folder, safe_serialization=True, data_config=DIGITS)
    return folder


def sums_of(model):
    names = [name for name in ("cls_token", "dist_token", "reg_token") if getattr(model, name, None) is not None]
    return [*names, "pos_embed"] if names else []


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(
    ARCHITECTURES, "deit_small_patch16_224", "deit_small_distilled_patch16_224", "vit_base_patch16_clip_224",
    "vit_wee_patch16_reg1_gap_256", "vit_giant_patch14_dinov2", "vit_so150m_patch16_reg4_map_256",
))  # fmt: skip
def test_logits_equal_those_of_timm_in_both_directions(tmp_path, name):
    model = create(name)
    size = model.patch_embed.img_size
    pixels = images(size)
    expected = of_torch(model, pixels)
    read = check_read(save(model, tmp_path / "theirs"), expected, pixels)
    check_written_back(read, sums_of(model))
    folder = export(read, tmp_path / "ours")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    np.testing.assert_allclose(of_torch(again, pixels), expected, rtol=0, atol=TOLERANCE)
    assert_trees_equal(weights.open_weights(folder).tree(), read.tree())
    cfg = again.pretrained_cfg
    np.testing.assert_allclose([*cfg["mean"], *cfg["std"]], [*DIGITS["mean"], *DIGITS["std"]])
    assert (cfg["input_size"], cfg["interpolation"]) == ((3, *size), "bicubic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "save_as"),
    [
        ("deit3_small_patch16_224", "safetensors"),
        ("vit_base_patch16_siglip_224", "torch"),
        ("vit_base_patch16_clip_224", "safetensors"),
    ],
)
def test_bare_file_is_described_by_its_shapes_and_says_what_is_assumed(tmp_path, name, save_as, caplog):
    """Without config.json, heads are 64 wide, the activation is timm's default, and CLIP's norms have their epsilon."""
    model = create(name, embed_dim=128, num_heads=2, num_classes=0, **({"act_layer": None} if "siglip" in name else {}))
    path = tmp_path / "weights.bin"
    (save_file if save_as == "safetensors" else torch.save)(model.state_dict(), path)
    pixels = images((32, 32))
    found = check_read(path, of_torch(model, pixels), pixels)
    assert found.description.num_outputs is None
    assert found.description.pp == ""
    epsilon = found.description.fields.get("norm_epsilon", 1e-6)
    assert epsilon == model.blocks[0].norm1.eps
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert f"assumed: num_heads=2, mlp='gelu', norm_epsilon={epsilon}" in warning
    assert ("QuickGELU" in warning) == ("clip" in name)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", timm_vit.NAMED)
def test_an_export_has_the_architecture_of_its_sizes(sizes):
    width, depth, heads = sizes
    name, plain, clip = timm_vit.NAMED[sizes]
    for patch, epsilon in [*((patch, 1e-6) for patch in plain), *((patch, 1e-5) for patch in clip), (7, 1e-6)]:
        fields = dict(width=width, depth=depth, num_heads=heads, patch_size=(patch, patch), norm_epsilon=epsilon)
        side = 384 if patch == 32 and epsilon == 1e-6 else 28 * patch
        description = Description("vit", 5, {**fields, "mlp": "gelu"}, f"decode|resize({side})|value_range(-1, 1)")
        found = timm_vit.config(description)["architecture"]
        assert f"_{name if patch != 7 else 'base'}_" in found
        assert found.endswith("_384") == (side == 384)
        if patch != 7:
            model = timm.create_model(found, device="meta")
            shape = model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads, model.patch_embed.patch_size
            assert (*shape, model.blocks[0].norm1.eps) == (width, depth, heads, (patch, patch), epsilon)


@pytest.mark.slow
def test_preprocessed_pixels_are_near_timms(tmp_path):
    """Pillow rounds pixels where TensorFlow truncates them: by at most a few of 255, divided by 255 and std."""
    pytest.importorskip("tensorflow", reason="needs TensorFlow; pip install -e .[data]")
    model, options = create("vit_small_patch16_224"), {**DIGITS, "crop_pct": 32 / 36}
    save_for_hf(model, tmp_path, safe_serialization=True, data_config=options)
    picture = Image.fromarray(np.random.default_rng(0).integers(256, size=(50, 50, 3), dtype=np.uint8))
    picture.save(tmp_path / "a.png")
    ops = Preprocess(weights.open_weights(tmp_path).description.pp)
    found = ops({"image": (tmp_path / "a.png").read_bytes()}, np.random.default_rng(0))["image"]
    expected = timm.data.create_transform((3, 32, 32), **options)(picture).numpy().transpose(1, 2, 0)
    assert np.abs(found - expected).mean() < 0.01
    assert np.abs(found - expected).max() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deit_small_distilled_patch16_224", "vit_base_patch16_clip_224"])
def test_layer_decay_scales_each_parameter_as_timm_does(tmp_path, name):
    model = create(name, depth=3)
    groups = param_groups_layer_decay(model, layer_decay=0.7)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    theirs = {name: scales[id(p)] for name, p in model.named_parameters()}
    read = weights.open_weights(save(model, tmp_path / "a"))
    ours = by_name(layer_scales(read.tree(), 0.7, 3))
    pairs = [(ours[x], theirs[y]) for link in links_of(read) for x in link.ours for y in link.theirs if y in theirs]
    np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-6)
    assert len({found for _, found in pairs}) == 5


def test_warm_up_of_averages_is_that_of_timm():
    theirs = ModelEmaV3(torch.nn.Linear(1, 1), decay=0.99, use_warmup=True)
    for updates in (0, 1, 2, 10, 900, 2000, 10**6):
        decay = 1 - float(step.warm_rate(0.99, jnp.int32(updates)))
        assert decay == pytest.approx(theirs.get_decay(updates + 1), rel=1e-5)


def check_described(name):
    """Compare the description of an architecture with the properties of timm's module; return True if it is read."""
    model = timm.create_model(name, device="meta")
    tensors = {key: Tensor(tuple(x.shape), lambda: None) for key, x in model.state_dict().items()}
    cfg = {k: model.pretrained_cfg[k] for k in ("input_size", "crop_pct", "mean", "std", "interpolation")}
    config = {"architecture": name, "global_pool": getattr(model, "global_pool", ""), "pretrained_cfg": cfg}
    if not timm_vit.matches(tensors, config):
        return False
    try:
        found = timm_vit.describe(tensors, config)
        links.check(timm_vit.links(found, tensors), tensors, name)
    except CheckpointError:
        return False
    block, fields = model.blocks[0], found.fields
    distilled = fields["pool_type"] == "tok+reg"
    assert (type(model).__name__, type(block).__name__) == ("VisionTransformer" + "Distilled" * distilled, "Block")
    assert fields["num_heads"] == block.attn.num_heads
    activation = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "SiLU": "swiglu"}[type(block.mlp.act).__name__]
    assert (fields["mlp"], type(block.mlp).__name__) == (activation, "GluMlp" if activation == "swiglu" else "Mlp")
    epsilon = fields.get("norm_epsilon", 1e-6)
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {epsilon}
    assert type(block.attn).__name__ == "Attention"
    assert not model.pool_include_prefix
    assert {"token": "tok", "avg": "gap", "map": "map"}[model.global_pool] == fields["pool_type"].removesuffix("+reg")
    return True


@pytest.mark.slow
def test_a_few_architectures_are_described_as_timm_builds_them():
    read = {name: check_described(name) for name in ("vit_base_patch16_gap_224", "vit_base_patch16_rpn_224")}
    assert read == {"vit_base_patch16_gap_224": True, "vit_base_patch16_rpn_224": False}


@pytest.mark.parametrize("channels", [1, 13])
def test_an_embedding_for_other_channels_is_that_of_timm(channels):
    kernel = np.random.default_rng(0).normal(size=(4, 5, 3, 8)).astype(np.float32)
    theirs = timm.models.adapt_input_conv(channels, torch.tensor(np.transpose(kernel, (3, 2, 0, 1)).copy()))
    found = adapted(kernel, channels, "repeat")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.transpose(theirs.numpy(), (2, 3, 1, 0)), rtol=1e-6)


@pytest.mark.exhaustive
def test_every_architecture_of_timm_is_described_as_timm_builds_it_or_refused():
    read = [name for name in timm.list_models(["vit_*", "deit*", "flexivit*"]) if check_described(name)]
    assert len(read) > 80, read
