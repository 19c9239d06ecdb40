"""preprocessor_config.json: the pixels are those of transformers' own processors, in both directions."""

import io

import foreign_models
import numpy as np
import pytest
from PIL import Image
from refusals import refused

from dcvit.errors import CheckpointError
from dcvit.weights import hf_processor, preprocessing
from dcvit.weights.export import check
from dcvit.weights.families import open_weights
from dcvit.weights.tensors import PROCESSOR
from input_pipeline import Preprocess, after_resizing
from input_pipeline.preprocess import keys, ops

# Class and config of the smallest model of each type, for images of 224 pixels, as of the default processors.
TINY = dict(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, patch_size=112, image_size=224
)
TYPES = {
    "vit": ("ViTForImageClassification", "ViTConfig"),
    "deit": ("DeiTForImageClassification", "DeiTConfig"),
    "siglip_vision_model": ("SiglipVisionModel", "SiglipVisionConfig"),
    "dinov2": ("Dinov2Model", "Dinov2Config"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
}
# Types without a processor in transformers, by the type whose processor they use.
AS = {"siglip_vision_model": "siglip", "dinov2_with_registers": "dinov2"}
SQUASH = 'decode|resize([40, 52], "bicubic", True)|central_crop(32)|value_range(-1, 1)'
STRINGS = [
    SQUASH,
    'decode|resize([40, 52], "bilinear", True)|central_crop([32, 48])|value_range(0, 1, [10.0, 20.0, 30.0], '
    "[110.0, 80.0, 90.0])",
    'decode|resize_small(40, "bicubic", True)|central_crop(32)|value_range(-1, 1)',
    'decode|resize([24, 32], "bilinear", True)|value_range(-1, 1)',
    'decode(1)|resize(32, "bilinear", True)|value_range(-1, 1)',
]


def photo(gray=False):
    """A smooth image of 60x90 pixels: interpolations that round differently are near each other."""
    rows, columns = np.mgrid[:60, :90]
    waves = [np.sin(rows / 7 + c) * np.cos(columns / (9 + c)) for c in range(3)]
    pixels = np.clip(127.5 + 120 * np.stack(waves, axis=-1), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if gray else pixels)


def processor_class(name):
    """The class of transformers that needs Pillow only, of which the others are equivalents."""
    transformers = foreign_models.libraries()[1]
    kind = name.removesuffix("ImageProcessor").removesuffix("ImageProcessorPil")
    return getattr(transformers, f"{kind}ImageProcessorPil")


def assert_same_pixels(pp, processor, image, tmp_path):
    """Pillow rounds pixels where TensorFlow truncates them: they differ by half a level on average, at most by two."""
    pytest.importorskip("tensorflow", reason="needs TensorFlow; pip install -e .[data]")
    image.save(tmp_path / "photo.png")
    data = {"image": (tmp_path / "photo.png").read_bytes()}
    found = Preprocess(pp)(data, np.random.default_rng(0))["image"]
    expected = processor(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    assert found.shape == expected.shape
    scale = np.ptp(expected) / 255
    assert np.abs(found - expected).mean() < 0.7 * scale
    assert np.abs(found - expected).max() < 2.3 * scale


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_model_without_the_file_is_preprocessed_as_transformers_would(kind, tmp_path):
    transformers = foreign_models.libraries()[1]
    model, config = (getattr(transformers, name) for name in TYPES[kind])
    model(config(**TINY)).save_pretrained(tmp_path)
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as NAMES

    processor = processor_class(NAMES[AS.get(kind, kind)]["pil"])()
    assert_same_pixels(open_weights(tmp_path).description.pp, processor, photo(), tmp_path)


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("pp", STRINGS)
def test_processor_of_transformers_yields_the_pixels_of_the_string_and_reads_back(pp, tmp_path):
    written = hf_processor.write(pp)
    processor = processor_class(written["image_processor_type"]).from_dict(written)
    image = photo(gray="decode(1)" in pp)
    assert_same_pixels(pp, processor, image, tmp_path)
    levels = processor_class(written["image_processor_type"]).from_dict({**written, "do_normalize": False})
    expected = 255 * levels(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    np.testing.assert_allclose(check._by_pillow(preprocessing.from_pp(pp), image), expected, atol=1e-3)
    size, channels = preprocessing.size_of(pp), preprocessing.channels_of(pp)
    assert hf_processor.read({PROCESSOR: written}, "ViT", size, channels) == pp
    assert hf_processor.read({PROCESSOR: processor.to_dict()}, "ViT", size, channels) == pp


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in hf_processor.DEFAULTS if name != "DINOv3ViT"])  # needs torchvision
def test_properties_that_a_file_lacks_are_those_of_its_class(name, tmp_path):
    """Also of one number for the size: that of both sides for some classes, of the smaller side for others."""
    for given in ({}, {"size": 48, "crop_size": 40, "do_center_crop": True}):
        processor = processor_class(name)(**given)
        found = {"image_processor_type": f"{name}ImageProcessorFast", **given}
        shape = np.shape(processor(photo())["pixel_values"][0])[1:]
        pp = hf_processor.read({PROCESSOR: found}, "ViT", shape, 3)
        assert_same_pixels(pp, processor, photo(), tmp_path)


@pytest.mark.parametrize("given", [{}, {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": 224}])
def test_dinov3_is_preprocessed_as_its_authors_do(given):
    """255 · 0.485 = 123.675 and so on: mean and standard deviation of ImageNet."""
    pp = hf_processor.read({PROCESSOR: given}, "DINOv3ViT", (256, 256), 3)
    assert pp == (
        'decode|resize(256, "bilinear", True)|value_range(0, 1, [123.675, 116.28, 103.53], [182.07, 173.4, 160.905])'
    )


CROP = {"crop_size": {"height": 28, "width": 28}, "do_center_crop": True}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"do_normalize": False}, 'resize(32, "bilinear", True)|value_range(0, 1, [0.0, 0.0, 0.0], [255.0, 255.0, '),
        ({"rescale_factor": 1 / 255}, "True)|value_range(-1, 1)"),
        ({"do_rescale": False, "image_mean": [9] * 3, "image_std": [2] * 3}, "[9.0, 9.0, 9.0], [11.0, 11.0, 11.0])"),
        ({"size": {"height": 32, "width": 35}, **CROP}, 'resize([37, 40], "bilinear", True)|central_crop(32)|'),
        ({"size": {"shortest_edge": 35}, **CROP}, 'resize_small(40, "bilinear", True)|central_crop(32)|'),
        ({"size": {"shortest_edge": 35}, **CROP, "do_center_crop": False}, 'decode|resize(32, "bilinear", True)|'),
        ({"do_resize": False}, CheckpointError("do_resize=false")),
    ],
)
def test_properties_of_a_processor_are_applied_or_refused(processor, expected):
    """Expected ends are those of (p · factor - mean) / std for pixels p in [0, 255]."""
    config = {PROCESSOR: {"size": 32, **processor}}
    if isinstance(expected, str):
        pp = hf_processor.read(config, "ViT", (32, 32), 3)
        assert expected in pp
        assert preprocessing.to_pp(preprocessing.from_pp(pp)) == pp
    else:
        with pytest.raises(CheckpointError, match=str(expected)):
            hf_processor.read(config, "ViT", (32, 32), 3)


@pytest.mark.parametrize(
    ("pp", "expected"),
    [
        ("decode|resize(8)|value_range(-1, 1)", (8, 8)),
        ("resize_small(9)|random_crop((4, 6))|pad(1, 128)|flip_lr|randaug(2, 10)|value_range", (6, 8)),
        ("decode_jpeg_and_inception_crop(8)|three_augment|color_jitter(0.3)|augmix|onehot(3)", (8, 8)),
        ("", None),
        ("decode|resize(8)|resize_long(16)", None),
    ],
)
def test_size_is_that_of_the_images_which_the_ops_yield(pp, expected):
    """None: it is that of the file or unknown, which is an error of one line."""
    if expected is None:
        with refused(CheckpointError, match="pp="):
            preprocessing.size_of(pp)
        return
    assert preprocessing.size_of(pp) == expected
    pytest.importorskip("tensorflow", reason="needs TensorFlow; pip install -e .[data]")
    photo().save(encoded := io.BytesIO(), "PNG")
    image = encoded.getvalue() if pp.startswith("decode") else np.asarray(photo())
    assert Preprocess(pp)({"image": image, "label": 0}, np.random.default_rng(0))["image"].shape[:2] == expected


def test_a_new_op_says_itself_that_it_keeps_the_size(monkeypatch):
    """No other module needs to know it."""
    for name, keeps_size in (("invert", True), ("turn", False)):
        op = keys.Change(lambda image, rng: image.swapaxes(0, 1), keeps_size=keeps_size)
        monkeypatch.setattr(ops, name, lambda op=op: op, raising=False)
    monkeypatch.setattr(ops, "__all__", [*ops.__all__, "invert", "turn"])
    assert preprocessing.size_of("decode|resize(8)|invert|value_range") == (8, 8)
    assert after_resizing("decode|resize(8)|invert|value_range")[1] == (8, 8, 3)
    assert after_resizing("decode|resize(8)|turn|value_range")[1] is None
    with refused(CheckpointError, match="has no size of images"):
        preprocessing.size_of("decode|resize(8)|turn|value_range")


def test_steps_that_no_processor_has_are_refused_in_one_line():
    with refused(CheckpointError, match="resizes and crops as other libraries cannot"):
        hf_processor.write("decode|resize(8)|pad(1)|value_range")


@pytest.mark.parametrize("op", [
    "value_range", "value_range(-1, 1, clip_values=True)", "value_range(vmax=3, in_max=[100, 200, 300])",
    "vgg_value_range", "vgg_value_range([1, 2, 3], [4, 5, 6], key='image')",
])  # fmt: skip
def test_mean_and_standard_deviation_have_the_effect_of_the_op(op):
    pixels = np.random.default_rng(0).integers(256, size=(5, 4, 3), dtype=np.uint8)
    expected = Preprocess(op)({"image": pixels}, np.random.default_rng(0))["image"]
    mean, std = preprocessing.mean_and_std(f"decode|{op}")
    np.testing.assert_allclose((pixels / 255 - mean) / std, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.interop
@pytest.mark.parametrize("size", [(30, 50), (200, 64), (16, 300), (97, 97)])
def test_patches_are_those_of_siglip2(size):
    """Of its processor of native aspect ratios (NaFlex)."""
    foreign_models.libraries()
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    theirs = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=40)(Image.fromarray(image), return_tensors="np")
    ours = Preprocess("patches(16, 40, upscale=True)|value_range(-1, 1)")({"image": image}, np.random.default_rng(0))
    assert ours["grid"].tolist() == theirs["spatial_shapes"][0].tolist()
    real = np.prod(ours["grid"])
    np.testing.assert_allclose(ours["image"].reshape(40, -1)[:real], theirs["pixel_values"][0][:real], atol=1e-6)
