"""Damaged, unsafe and unsuitable files of image models: each is an error of one line that names file and cause."""

import json
import pickle
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorstore

import dcvit
from dcvit.errors import CheckpointError
from dcvit.weights import links as linking
from dcvit.weights import own
from dcvit.weights.export import formats
from dcvit.weights.families import FAMILIES, WRITTEN, Weights, open_weights
from dcvit.weights.family import Description, shapes_of
from dcvit.weights.tensors import Tensor

FIELDS = dict(width=16, depth=2, num_heads=2, mlp_dim=32, patch_size=(8, 8), mlp="gelu", pool_type="tok")
PP = "decode|resize(16)|value_range(-1, 1)"
SIZES = {"embedding/kernel": (8, 8, 3, 16), "pos_embedding": (1, 4, 16)}  # of images of 16 pixels
NO_TENSORS = "no file of plain tensors|is no safetensors or .npz file"  # the latter without PyTorch
MODELS = {
    "timm": Description("vit", 5, FIELDS, PP),
    "hf_vit": Description("vit", 5, {**FIELDS, "norm_epsilon": 1e-12}, PP),
    "siglip": Description("vit", None, {**FIELDS, "pool_type": "map"}, PP),
    "dinov2": Description("vit", None, {**FIELDS, "layer_scale": 1.0}, PP),
    "dinov3": Description("vit", None, {
        **FIELDS, "layer_scale": 1.0, "posemb": "rotary2d", "qkv_bias": "qv", "registers": 4, "norm_epsilon": 1e-5
    }, PP),
    "big_vision": Description("vit", 5, FIELDS, PP),
}  # fmt: skip
SHARED = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8, num_channels=3)
# Of families that are read only: config.json, and tensors by which the names are recognized.
READ = {
    "siglip": ({"model_type": "siglip_vision_model", "intermediate_size": 32, "hidden_act": "gelu"},
               ["embeddings.patch_embedding.weight", "head.probe"]),
    "dinov2": ({"model_type": "dinov2", "mlp_ratio": 2}, ["embeddings.patch_embeddings.projection.weight"]),
    "dinov3": ({"model_type": "dinov3_vit", "intermediate_size": 32, "num_register_tokens": 4}, []),
}  # fmt: skip


def model(family):
    """Return the tensors and the config of a small intact model; big_vision's have no config.json."""
    shapes = {
        name.format(i): shape for name, shape in shapes_of(MODELS[family]).items() for i in range(FIELDS["depth"])
    }
    shapes |= {name: size for name, size in SIZES.items() if name in shapes}
    arrays = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
    params = {name: Tensor(array.shape, lambda array=array: array) for name, array in arrays.items()}
    config, names = READ.get(family, ({}, None))
    if family in WRITTEN:
        config = WRITTEN[family].config(MODELS[family])
    elif config:
        config = {**SHARED, **config}
    known = None if names is None else {name: Tensor((), None) for name in names}
    links = FAMILIES[family].links(MODELS[family], known)
    return dict(linking.write(links, params)), config


def save(folder, tensors, config=None):
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def changed(family, change):
    """Return a writer of a model after `change(tensors, config)`."""

    def write(folder):
        tensors, config = model(family)
        replaced = change(tensors, config)
        return save(folder, tensors, config if replaced is None else replaced)

    return write


def configured(family, **values):
    """Return a writer of a model with other values in config.json; "model_args__x" is x in `model_args`."""

    def change(tensors, config):
        for key, value in values.items():
            *above, last = key.split("__")
            where = config[above[0]] if above else config
            where[last] = value

    return changed(family, change)


def bare(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def cut(folder):
    save(folder, model("timm")[0])
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    return folder


def npz(folder, tensors=None, subtree=""):
    np.savez(folder / "a.npz", **(tensors or model("big_vision")[0]))
    return folder / f"a.npz{subtree}"


def cut_npz(folder):
    path = npz(folder)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def without(folder):
    """Write a file of big_vision without a tensor, and with another one."""
    tensors = model("big_vision")[0]
    tensors["Transformer/encoderblock_1/MlpBlock_0/Dense_2/bias"] = tensors.pop("Transformer/encoder_norm/bias")
    return npz(folder, tensors)


def lost_chunk(folder):
    """Write a folder of big_vision without the chunk of an array."""
    path = folder / "a.bv"
    path.mkdir()
    for name, array in model("big_vision")[0].items():
        kvstore = {"driver": "file", "path": str(path / f"params/{name}".replace("/", "~"))}
        spec, dtype = {"driver": "zarr", "kvstore": kvstore}, tensorstore.dtype(array.dtype)
        tensorstore.open(spec, create=True, dtype=dtype, shape=array.shape).result().write(array).result()
    (path / "params~cls/0.0.0").unlink()
    return path


def pointer(text):
    def write(folder):
        (folder / "a.bv-LAST").write_text(text)
        return folder / "a.bv"

    return write


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def pickled(folder):
    torch = pytest.importorskip("torch", reason="needs PyTorch; pip install -e .[interop]")
    torch.save({"model": Bomb()}, folder / "a.pth")
    return folder / "a.pth"


def of_dtype(name, dtype):
    return lambda tensors, config: tensors.update({name: tensors[name].astype(dtype)})


def sparse(folder):
    torch = pytest.importorskip("torch", reason="needs PyTorch; pip install -e .[interop]")
    tensors, config = model("timm")
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}
    torch.save({**tensors, "norm.bias": tensors["norm.bias"].to_sparse()}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ones(name, shape=(16,)):
    return lambda tensors, config: tensors.update({name: np.ones(shape, np.float32)})


def rename(old, new):
    return lambda tensors, config: tensors.update({new: tensors.pop(old)})


def changed_npz(change):
    return lambda folder: npz(folder, change(model("big_vision")[0]))


def two_names(folder):
    tensors = model("big_vision")[0]
    tensors["params/head/bias"] = tensors["head/bias"] + 1
    safetensors.numpy.save_file(tensors, folder / "a.safetensors", own.metadata(MODELS["big_vision"]))
    return folder / "a.safetensors"


CASES = {
    "cut safetensors": (cut, "is not a safetensors file, or is damaged"),
    "cut npz": (cut_npz, "is not an .npz archive, or is damaged"),
    "text": (bare("a.bin", b"hello"), NO_TENSORS),
    "pointer of Git LFS": (
        bare("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "git lfs pull"
    ),
    "pickle": (bare("a.pkl", pickle.dumps(Bomb())), NO_TENSORS),
    "object in a file of torch": (pickled, NO_TENSORS),
    "ViT, channels": (configured("hf_vit", num_channels=1), r"num_channels=1, but .*patch\w+\S* has 3 channels"),
    "empty folder": (lambda folder: folder, "has no weights"),
    "integers": (changed("timm", of_dtype("norm.bias", np.int8)), r"norm\.bias has numbers of int8; expected float32"),
    "sparse": (sparse, r"pytorch_model\.bin: cannot read norm\.bias: "),
    "config is no JSON": (lambda f: save(f, model("timm")[0], "{"), "cannot read .*config.json"),
    "another kind of model": (lambda f: save(f, {"layer1.0.conv1.weight": np.ones(3)}), "those of no known model"),
    "timm, names": (
        changed("timm", rename("blocks.1.mlp.fc2.bias", "blocks.1.mlp.fc3.bias")),
        r"1 only in the checkpoint: blocks\.1\.mlp\.fc3\.bias; 1 only in the model: blocks\.1\.mlp\.fc2\.bias",
    ),
    "timm, shape": (
        changed("timm", ones("blocks.1.attn.qkv.weight", (16, 48))),
        r"blocks\.1\.attn\.qkv\.weight \(checkpoint \(16, 48\), model \(48, 16\)\)",
    ),
    "timm, distilled, one head": (changed("timm", ones("dist_token")), "with its two classifiers only"),
    "timm, DINOv3": (changed("timm", ones("blocks.0.gamma_1")), "of DINOv3, files of transformers are read"),
    "timm, architecture": (configured("timm", architecture="vit_base_patch16_rpn_224"), "architecture 'vit_base_p"),
    "timm, pooling": (configured("timm", global_pool="avgmax"), "global_pool='avgmax' is not supported"),
    "timm, positions": (changed("timm", ones("pos_embed", (1, 7, 16))), "pos_embed has 7 rows, but images of 16x16"),
    "ViT, no config": (changed("hf_vit", lambda tensors, config: {}), "no config.json beside the weights"),
    "ViT, activation": (configured("hf_vit", hidden_act="relu"), "hidden_act='relu' is not supported"),
    "ViT, biases": (configured("hf_vit", qkv_bias=False), "6 only in the checkpoint: vit.encoder.layer.0.attention"),
    "ViT, image": (configured("hf_vit", image_size=32), "the model has 4 position embeddings, expected 16"),
    "SigLIP, fused weight": (
        changed("siglip", ones("head.attention.in_proj_weight", (16, 16))), r"\(16, 16\), model \(48, 16\)"
    ),
    "DINOv2, ratio": (configured("dinov2", mlp_ratio=2.5), "mlp_ratio=2.5; expected a positive integer"),
    "DINOv3, ConvNeXt": (
        lambda f: save(f, {"stages.0.layers.0.gamma": np.ones(3)}, '{"model_type": "dinov3_convnext"}'),
        "model_type='dinov3_convnext' is not supported; supported: dinov3_vit",
    ),
    "DINOv3, biases": (configured("dinov3", value_bias=False), "biases of query_bias alone are not supported"),
    "DINOv3, period": (configured("dinov3", rope_theta=10000.0), "rope_theta=10000.0 is not supported, only 100.0"),
    "big_vision, names": (without, "only in the checkpoint: .*Dense_2/bias; 1 only in the model: .*encoder_norm/bias"),
    "big_vision, old and new name": (
        changed_npz(lambda tensors: {**tensors, "Transformer/pos_embedding": tensors["pos_embedding"] + 1}),
        "Transformer/pos_embedding is another array of pos_embedding",
    ),
    "own, two names": (two_names, "1 only in the checkpoint: head/bias"),
    "big_vision, subtree": (lambda f: npz(f, subtree=":img"), "has no subtree 'img'; it has Transformer, cls"),
    "big_vision, pointer": (pointer("12\n"), "names step '12', but there is no folder 'a.bv-12'"),
    "big_vision, lost chunk": (lost_chunk, "params~cls is damaged"),
}  # fmt: skip
OF_TORCH = ("object in a file of torch", "sparse")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.interop if name in OF_TORCH else ()) for name in CASES]
)
def test_broken_file_is_an_error_of_one_line(tmp_path, name):
    write, match = CASES[name]
    path = write(tmp_path)
    with pytest.raises(CheckpointError, match=match) as error:
        open_weights(path).tree()
    message = str(error.value)
    assert str(tmp_path) in message
    assert len(message.splitlines()) == 1
    assert len(message) < 700
    assert "weights_only" not in message  # PyTorch recommends to unpickle the file
    assert message.isprintable()


@pytest.mark.parametrize(
    ("fields", "outputs", "family"),
    [
        ({}, 5, "hf_vit"),
        ({"registers": 1}, 5, "hf_vit"),
        ({"rep_size": True}, None, "hf_vit"),
        ({"layer_scale": 0.1}, 5, None),
        ({}, None, None),
    ],
)
def test_class_of_transformers_is_one_that_can_express_a_model(fields, outputs, family):
    """None stands for none, so that the export has this project's own class."""
    model = Weights(Path(), "", Description("vit", outputs, {**FIELDS, **fields}, PP), {})
    if family:
        assert formats.native_family(model, formats.NATIVE["vit"])[0] == family
    else:
        with pytest.raises(CheckpointError, match=r"hf_vit: .*cannot express"):
            formats.native_family(model, formats.NATIVE["vit"])


@pytest.mark.parametrize("family", MODELS)
def test_intact_file_is_read(tmp_path, family):
    """So that the errors above are due to the damage."""
    tensors, config = model(family)
    assert open_weights(save(tmp_path, tensors, config)).family == family


@pytest.mark.slow
def test_half_precision_is_loaded_as_float32(tmp_path):
    tensors, config = model("hf_vit")
    save(tmp_path, {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}, config)
    params = jax.tree.leaves(dcvit.load(tmp_path).params)
    assert {x.dtype for x in params} == {np.dtype(np.float32)}


def test_pooler_beside_a_classifier_is_not_part_of_the_model(tmp_path):
    """ViTForImageClassification classifies the class token, with any other tensors in its file."""
    tensors, config = model("hf_vit")
    ones("vit.pooler.dense.weight", (16, 16))(tensors, config)
    ones("vit.pooler.dense.bias")(tensors, config)
    weights = open_weights(save(tmp_path, tensors, config))
    assert not weights.description.fields.get("rep_size")
    assert "pre_logits" not in weights.tree()


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("timm", {"compose": "both"}, r"timm cannot express compose='both', only None"),
        ("timm", {"pool_type": "0"}, "pool_type='0', only"),
        ("hf_vit", {"num_outputs": None}, "cannot express features without pre_logits"),
        ("hf_vit", {"layer_scale": 0.1}, "layer_scale=0.1, only None"),
        ("hf_vit", {"posemb": "sincos2d"}, "posemb='sincos2d', only 'learn'"),
    ],
)
def test_model_that_a_library_cannot_express_is_refused(family, fields, match):
    described = {**MODELS[family].fields, **fields}
    outputs = described.pop("num_outputs", MODELS[family].num_outputs)
    with pytest.raises(CheckpointError, match=match):
        WRITTEN[family].config(MODELS[family]._replace(fields=described, num_outputs=outputs))


def test_fields_with_the_defaults_of_the_model_are_written():
    """A description of a run leaves them out."""
    fields = {k: v for k, v in MODELS["hf_vit"].fields.items() if k not in ("width", "num_heads", "patch_size")}
    found = WRITTEN["hf_vit"].config(MODELS["hf_vit"]._replace(fields=fields))
    assert (found["hidden_size"], found["num_attention_heads"], found["patch_size"]) == (768, 12, 16)
