"""Damaged, unsafe and unsuitable files of image models: each is an error of one line that names file and cause."""

import json

import numpy as np
import pytest
import safetensors.numpy
import tensorstore
from refusals import refused

from dcvit.errors import CheckpointError
from dcvit.weights import links as linking
from dcvit.weights.families import FAMILIES, open_weights
from dcvit.weights.family import Description, shapes_of
from dcvit.weights.tensors import Tensor

FIELDS = dict(width=16, depth=2, num_heads=2, mlp_dim=32, patch_size=(8, 8), mlp="gelu", pool_type="tok")
PP = "decode|resize(16)|value_range(-1, 1)"
SIZES = {"embedding/kernel": (8, 8, 3, 16), "pos_embedding": (1, 4, 16)}  # of images of 16 pixels
MODELS = {
    "timm": Description("vit", 5, FIELDS, PP),
    "hf_vit": Description("vit", 5, {**FIELDS, "norm_epsilon": 1e-12}, PP),
    "big_vision": Description("vit", 5, FIELDS, PP),
}


def model(family):
    """Return the tensors and the config of a small intact model; big_vision's have no config.json."""
    shapes = {
        name.format(i): shape for name, shape in shapes_of(MODELS[family]).items() for i in range(FIELDS["depth"])
    }
    shapes |= {name: size for name, size in SIZES.items() if name in shapes}
    arrays = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
    params = {name: Tensor(array.shape, lambda array=array: array) for name, array in arrays.items()}
    config = FAMILIES[family].config(MODELS[family])
    return dict(linking.write(FAMILIES[family].links(MODELS[family], None), params)), config


def save(folder, tensors, config):
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def other(family, **values):
    """Return a writer of a model with other values in config.json, or other shapes of tensors."""

    def write(folder):
        tensors, config = model(family)
        for name, value in values.items():
            if isinstance(value, tuple):
                tensors[name] = np.ones(value, np.float32)
            else:
                config[name] = value
        return save(folder, tensors, config)

    return write


def cut(folder):
    path = save(folder, *model("timm")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def pointer_of_git_lfs(folder):
    (folder / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return folder / "a.safetensors"


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def pickled(folder):
    torch = pytest.importorskip("torch", reason="needs PyTorch; pip install -e .[interop]")
    torch.save({"model": Bomb()}, folder / "a.pth")
    return folder / "a.pth"


def old_and_new_name(folder):
    tensors = model("big_vision")[0]
    np.savez(folder / "a.npz", **tensors, **{"Transformer/pos_embedding": tensors["pos_embedding"] + 1})
    return folder / "a.npz"


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


CASES = {
    "cut safetensors": (cut, "is not a safetensors file, or is damaged"),
    "pointer of Git LFS": (pointer_of_git_lfs, "git lfs pull"),
    "object in a file of torch": (pickled, "no file of plain tensors|is no safetensors or .npz file"),
    "another kind of model": (lambda f: save(f, {"layer1.0.conv1.weight": np.ones(3)}, {}), "those of no known model"),
    "timm, shape": (
        other("timm", **{"blocks.1.attn.qkv.weight": (16, 48)}),
        r"blocks\.1\.attn\.qkv\.weight \(checkpoint \(16, 48\), model \(48, 16\)\)",
    ),
    "timm, QuickGELU": (
        other("timm", architecture="vit_base_patch16_clip_quickgelu_224"),
        "is not a ViT",
    ),
    "timm, positions": (other("timm", pos_embed=(1, 7, 16)), "pos_embed has 7 rows, but images of 16x16"),
    "ViT, regression": (other("hf_vit", problem_type="regression"), "problem_type='regression' is not supported"),
    "big_vision, names": (old_and_new_name, "Transformer/pos_embedding is another array of pos_embedding"),
    "big_vision, lost chunk": (lost_chunk, "params~cls is damaged"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.interop if "torch" in name else ()) for name in CASES]
)
def test_broken_file_is_an_error_of_one_line(tmp_path, name):
    write, match = CASES[name]
    path = write(tmp_path)
    with refused(CheckpointError, str(tmp_path), match=match) as error:
        open_weights(path).tree()
    assert "weights_only" not in str(error.value)  # PyTorch recommends to unpickle the file


def test_pooler_beside_a_classifier_is_not_part_of_the_model(tmp_path):
    """ViTForImageClassification classifies the class token, with any other tensors in its file."""
    shapes = {"vit.pooler.dense.weight": (16, 16), "vit.pooler.dense.bias": (16,)}
    weights = open_weights(other("hf_vit", **shapes)(tmp_path))
    assert not weights.description.fields.get("rep_size")
    assert "pre_logits" not in weights.tree()


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("timm", {"compose": "both"}, r"timm cannot express compose='both', only None"),
        ("hf_vit", {"layer_scale": 0.1}, "layer_scale=0.1, only None"),
    ],
)
def test_model_that_a_library_cannot_express_is_refused(family, fields, match):
    with pytest.raises(CheckpointError, match=match):
        FAMILIES[family].config(MODELS[family]._replace(fields={**MODELS[family].fields, **fields}))


def test_fields_with_the_defaults_of_the_model_are_written():
    """A description of a run leaves them out."""
    found = FAMILIES["hf_vit"].config(Description("vit", 5, {"mlp": "gelu", "pool_type": "tok"}, PP))
    assert (found["hidden_size"], found["num_attention_heads"], found["patch_size"]) == (768, 12, 16)
