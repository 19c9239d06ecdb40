"""`dcvit.load`: a run as a Python object gives what the commands print."""

import dataclasses
import json
from pathlib import Path

import flax.traverse_util
import image_datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from refusals import refused
from trained_workdirs import load_params

import dcvit
from dcvit import cli, generate, predict
from dcvit.dcmha.device import splits_arrays
from dcvit.errors import CheckpointError, ConfigError, InputError
from dcvit.hub.open import open_model
from dcvit.inference.images import ImageModel
from dcvit.inference.sampling import Sampling
from dcvit.inference.texts import LanguageModel, TextOptions
from dcvit.models import lm, vit
from input_pipeline.text.tokenizer import ByteTokenizer

IMAGES = ["tests/data/four.png", "tests/data/seven.png"]
pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture(scope="module")
def digits(digits_workdir):
    return dcvit.load(digits_workdir)


@pytest.fixture(scope="module")
def text(lm_workdir):
    return dcvit.load(str(lm_workdir))


def small(module, example, **fields):
    params = jax.jit(module.init)(jax.random.key(0), example)["params"]
    return (ImageModel if isinstance(module, vit.ViT) else LanguageModel)(module, params, {}, **fields)


@pytest.fixture(scope="module")
def model():
    module = vit.Model(3, width=8, depth=1, num_heads=1, mlp_dim=8, patch_size=(4, 4))
    return small(module, jnp.zeros((1, 8, 8, 3)), pp="decode|value_range(-1, 1)", class_names=["a", "b", "c"])


@pytest.fixture(scope="module")
def words():
    module = lm.Model(257, width=8, depth=1, num_heads=1, mlp_dim=8, context=16)
    return small(module, jnp.zeros((1, 2), jnp.int32), open_tokenizer=lambda _: ByteTokenizer())


class TestImages:
    def test_predictions_are_those_of_the_command(self, digits, digits_workdir, capsys):
        options = ["--workdir", str(digits_workdir), "--format", "json", "--topk", "3"]
        assert cli.run(predict.main, [*options, *IMAGES]) == 0
        rows = json.loads(capsys.readouterr().out)
        found = [p for predictions in digits.predict(IMAGES, topk=3) for p in predictions]
        assert [p._asdict() for p in found] == rows

    def test_paths_pictures_and_arrays_are_the_same_images(self, digits):
        pictures = [Image.open(path) for path in IMAGES]
        arrays = [np.asarray(picture.convert("RGB")) for picture in pictures]
        expected = digits.features(IMAGES, "logits")
        assert expected.shape == (2, 10)
        for images in (pictures, arrays, np.stack(arrays), [Path(path).read_bytes() for path in IMAGES]):
            np.testing.assert_array_equal(digits.features(images, "logits"), expected)
        one = digits.features(IMAGES[0], "logits")
        np.testing.assert_allclose(one, expected[:1], atol=1e-5)

    def test_features_are_the_named_intermediates(self, digits):
        assert digits.features(IMAGES).shape == (2, 32)
        head = jax.tree.map(np.asarray, digits.params["head"])
        logits = digits.features(IMAGES) @ head["kernel"] + head["bias"]
        np.testing.assert_allclose(digits.features(IMAGES, "logits"), logits, atol=1e-4)
        assert digits.features(IMAGES, "encoder/block00/sa").shape == (2, 4, 32)

    def test_a_checkpoint_is_opened_with_the_config_of_its_run(self, digits, digits_workdir):
        model = dcvit.load(digits_workdir / "checkpoints" / "30")
        assert model.config == digits.config
        assert not np.array_equal(model.features(IMAGES), digits.features(IMAGES))

    def test_attention_has_all_patches_and_a_hook_changes_the_output(self, digits):
        found = digits.run_with_cache(IMAGES[0], {"block*/heads": lambda x: 0 * x}, names=["*/weights"])
        (maps,) = digits.attention(IMAGES[0]).values()
        assert {matrix.shape for matrix in maps} == {(1, digits.module.num_heads, 4, 4)}
        np.testing.assert_allclose(maps.weights.sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(found.arrays["block00/weights"], maps.weights, rtol=1e-5)
        assert np.abs(found.output - digits.features(IMAGES[0], "logits")).max() > 0.01

    def test_features_of_patches_have_no_padding(self, model):
        """An image of 8x8 has 4 patches, and the op `patches` pads them to 12."""
        plain = small(model.module.clone(posemb="sincos2d"), jnp.zeros((1, 8, 8, 3)), pp=model.pp)
        packed = dataclasses.replace(plain, pp="decode|patches(4, 12)|value_range(-1, 1)")
        square, wide = (np.full((8, width, 3), 99, np.uint8) for width in (8, 16))
        for name in ("encoded", "stem"):
            found = packed.features([square, square], name)
            assert found.shape == (2, 4, 8)
            np.testing.assert_allclose(found[:1], plain.features(square, name).reshape(1, 4, 8), atol=1e-5)
        assert packed.features([square, wide]).shape == (2, 8)
        with pytest.raises(ConfigError, match="'encoded' has a vector for each patch"):
            packed.features([square, wide], "encoded")


class TestText:
    def test_text_is_that_of_the_command(self, text, lm_workdir, capsys):
        words = ["--prompt", "def ", "--tokens", "8", "--temperature", "0"]
        assert cli.run(generate.main, ["--workdir", str(lm_workdir), *words]) == 0
        assert "def " + text.generate("def ", 8, temperature=0) + "\n" == capsys.readouterr().out

    @pytest.mark.exhaustive
    def test_text_and_its_tokens_are_the_same_input(self, text):
        tokens = np.frombuffer(b"def main", np.uint8)
        expected = text.features("def main", "logits")
        assert expected.shape == (1, 8, text.module.vocab_size)
        np.testing.assert_array_equal(text.features(tokens, "logits"), expected)
        np.testing.assert_array_equal(text.features(np.stack([tokens, tokens]), "logits")[1:], expected)
        assert text.attention("def main", layers=[-1]).keys() == {text.module.depth - 1}


class TestGeneration:
    def test_a_stream_is_the_text_in_pieces(self, words):
        options = TextOptions(12, Sampling(temperature=2.0), seed=3)
        whole = words.continue_texts(["a"], options).texts[0].text
        pieces = words.stream("a", options)
        first = next(pieces)
        assert jax.sharding.get_mesh().empty, "the mesh of the model is not that of the caller between two pieces"
        rest = list(pieces)
        assert len(rest) > 1
        assert "".join([first, *rest]) == whole


@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray, lambda x: jax.device_put(x, jax.devices()[3])])
def test_a_model_on_one_of_several_devices_may_use_kernels(wrap):
    """The compiler cannot split them, and without a mesh it may have to split any program."""
    model = ImageModel(vit.Model(3, depth=0), {"x": wrap(np.ones(2, np.float32))}, {})
    assert splits_arrays()
    with model.on_devices():
        assert not splits_arrays()
        np.testing.assert_array_equal(jax.jit(lambda p: 2 * p["x"])(model.params), [2, 2])


def test_sharded_model_gives_the_same_results(digits_workdir, lm_workdir, digits, text):
    images, words = dcvit.load(digits_workdir, sharding="fsdp"), dcvit.load(lm_workdir, sharding="fsdp")
    kernel = images.params["Transformer"]["encoderblock_0"]["MlpBlock_0"]["Dense_0"]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    np.testing.assert_allclose(images.features(IMAGES, "logits"), digits.features(IMAGES, "logits"), atol=1e-4)
    assert words.generate("def ", 8, temperature=0) == text.generate("def ", 8, temperature=0)


class TestErrors:
    IMAGE = np.zeros((8, 8, 3), np.uint8)

    def test_unusable_image_is_one_line(self, model):
        with refused(InputError, "0: the image has 7 channels; expected 3, the number given to decode"):
            model.predict(np.zeros((8, 8, 7), np.uint8))
        with refused(InputError, "0: 4 channels, and the model has images of 3"):
            model.predict(np.zeros((1, 8, 8, 4), np.float32))
        with refused(InputError, "0: Image size"):
            model.predict([image_datasets.bomb_png(60_000, 60_000)])

    def test_picture_of_another_mode_is_that_of_its_file(self, model, tmp_path):
        pixels = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels).convert("CMYK")
        picture.save(path := tmp_path / "a.tif")
        np.testing.assert_array_equal(model.features(picture, "stem"), model.features(path, "stem"))

    @pytest.mark.slow
    def test_model_without_a_head_has_features_and_no_classes(self, model):
        headless = small(model.module.clone(num_classes=None), jnp.zeros((1, 8, 8, 3)), pp=model.pp)
        assert headless.features(self.IMAGE).shape == (1, 8)
        with pytest.raises(ConfigError, match="without a head has no classes: use features"):
            headless.predict(self.IMAGE)

    def test_wrong_calls_name_what_to_do(self, model, words):
        with pytest.raises(ConfigError, match="did you mean 'encoder/block00/sa'"):
            model.features(self.IMAGE, "encoder/block0/sa")
        with pytest.raises(ConfigError, match="no layer 1"):
            model.attention(self.IMAGE, layers=[1])
        assert model.predict([]) == []
        with pytest.raises(InputError, match="tokens"):
            words.features(np.asarray([300]))

    @pytest.mark.slow
    def test_more_tokens_than_learned_positions_are_one_line(self, words):
        learned = small(
            words.module.clone(position="learned"), jnp.zeros((1, 2), jnp.int32), open_tokenizer=words.open_tokenizer
        )
        for call in (learned.features, learned.attention):
            with pytest.raises(InputError, match="17 tokens are more than the model's context of 16"):
                call(np.zeros((2, 17), np.int32))
        assert words.features(np.zeros(17, np.int32), "logits").shape == (1, 17, 257)  # rotary positions go on

    def test_source_that_is_no_model_is_one_line(self, tmp_path, digits_workdir):
        with pytest.raises(CheckpointError, match="has no weights"):
            dcvit.load(tmp_path)
        with pytest.raises(ConfigError, match="did you mean 'fsdp'"):
            dcvit.load(digits_workdir, sharding="fdsp")

    def test_a_run_that_diverged_is_refused_by_the_name_of_the_parameter(self, tmp_path, digits_workdir):
        params = jax.device_get(load_params(digits_workdir))
        params["head"]["bias"] = np.where(np.arange(10) == 2, np.nan, params["head"]["bias"])
        flat = flax.traverse_util.flatten_dict(params, sep="/")
        np.savez(tmp_path / "a.npz", **flat)
        with pytest.raises(CheckpointError, match=r"a\.npz: head/bias has numbers .*float32, such as nan;"):
            ImageModel.of(open_model(digits_workdir, checkpoint=tmp_path / "a.npz"))
