"""Files of weights: which are read, and where their description is; unsafe and damaged files are one-line errors."""

import json
import pickle
import re
import struct
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import tensorstore
from conversion_models import image_model
from refusals import refused

from dcvit.errors import CheckpointError
from dcvit.weights import families, timm_vit
from dcvit.weights import links as linking
from dcvit.weights.families import FAMILIES, open_weights
from dcvit.weights.family import Description, metadata, shapes_of, to_json
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import Tensor, open_file, open_npz

MAGIC = b"\x93NUMPY"
ARRAYS = {
    "params/head/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/columns": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "params/scale": np.float64(3.5),
    "opt/flags": np.array([True, False]),
    "opt/none": np.zeros((0, 5), np.uint8),
    "name": np.array("ViT"),
    "big": np.arange(3, dtype=">i4"),
}


def read(path):
    return {name: array.read() for name, array in open_npz(path).items()}


def header(shape, descr="<f4", version=1):
    """The header of a .npy file; its fields may be invalid."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return MAGIC + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text


def archive(path, content, method=zipfile.ZIP_STORED):
    """Write a zip with the member a.npy."""
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr(zipfile.ZipInfo("a.npy"), content, method)
    return path


def npz_refused(path, match):
    """Assert that reading raises a one-line error that names the file, without allocating the announced size."""
    with refused(CheckpointError, str(path), match=match, most_bytes=32 << 20):
        read(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_equal_those_of_numpy_load(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    got = read(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as expected:
        assert list(got) == expected.files
        for name, array in got.items():
            assert array.dtype == expected[name].dtype
            assert array.flags.f_contiguous == expected[name].flags.f_contiguous
            np.testing.assert_array_equal(array, expected[name])


def test_opening_reads_no_array(tmp_path):
    """So that a program that only recognizes a file does not need the memory of its arrays."""
    np.savez(tmp_path / "a.npz", large=np.zeros((64, 1 << 16), np.float32))
    tracemalloc.start()
    opened = open_npz(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened["large"].shape == (64, 1 << 16)
    assert peak < 1 << 20


class Bomb:
    """Calls a function when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def test_objects_are_never_unpickled(tmp_path):
    np.savez(path := tmp_path / "a.npz", head=np.array([Bomb()], object))
    npz_refused(path, "member 'head' is not an array, or is damaged: Object arrays")
    npz_refused(archive(path, header((1,), [("a", "|O")]) + pickle.dumps([Bomb()])), "Object arrays")
    path.write_bytes(pickle.dumps(Bomb()))
    npz_refused(path, "is not an .npz archive, or is damaged: ")


@pytest.mark.parametrize(
    "start", [header((3,)), header((1,)), header((2,), "<q9"), MAGIC + b"\1\0" + struct.pack("<H", 20) + b"exit()"]
)
def test_header_that_contradicts_the_archive_is_refused(tmp_path, start):
    npz_refused(archive(tmp_path / "a.npz", start + bytes(8)), "member 'a' is not an array, or is damaged")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_changed_byte_of_an_array_is_refused(tmp_path, method):
    array = np.random.default_rng(0).random(500)
    path = archive(tmp_path / "a.npz", header((500,), "<f8", version=2) + array.tobytes(), method)
    np.testing.assert_array_equal(read(path)["a"], array)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") - 200] ^= 1
    path.write_bytes(data)
    npz_refused(path, "member 'a'")


def test_truncated_file_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", **ARRAYS)
    whole = (tmp_path / "whole.npz").read_bytes()
    for end in range(0, len(whole) - 1, 97):
        (tmp_path / "a.npz").write_bytes(whole[:end])
        npz_refused(tmp_path / "a.npz", "is not an .npz archive, or is damaged")


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
    params = {
        name: Tensor(shape, lambda shape=shape: np.full(shape, 0.1, np.float32)) for name, shape in shapes.items()
    }
    links = FAMILIES[family].links(MODELS[family], None)
    return dict(linking.write(links, params)), FAMILIES[family].config(MODELS[family])


def save(folder, tensors, config):
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def other(family, **values):
    """Return a writer of a model with other values in config.json, or other shapes of tensors."""

    def write(folder):
        tensors, config = model(family)
        arrays = {name: np.ones(shape, np.float32) for name, shape in values.items() if isinstance(shape, tuple)}
        changed = {name: value for name, value in values.items() if name not in arrays}
        return save(folder, tensors | arrays, config | changed)

    return write


def cut(folder):
    path = save(folder, *model("timm")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def pointer_of_git_lfs(folder):
    (folder / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return folder / "a.safetensors"


def quantized(folder):
    tensors, config = model("hf_vit")
    return save(folder, tensors | {"classifier.weight": np.ones((5, 16), np.int8)}, config)


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


def described_as(**config):
    """Return a writer of tensors of no model, with a config.json."""
    return lambda folder: save(folder, {"layer1.0.conv1.weight": np.ones(3)}, config)


def index_of_another_folder(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ".."}}))
    return folder


OWN = Description("vit", 4, dict(width=[1]))
CASES = {
    "cut safetensors": (cut, "is not a safetensors file, or is damaged"),
    "pointer of Git LFS": (pointer_of_git_lfs, "git lfs pull"),
    "object in a file of torch": (pickled, "no file of plain tensors|is no safetensors or .npz file"),
    "index": (index_of_another_folder, "no file"),
    "another kind of model": (described_as(), "those of no known model"),
    "own, no model": (described_as(dcvit=to_json(OWN)), r"width=\(1,\) should be of type int"),
    "modeling file": (described_as(model_type="dcvit", num_heads=5), "num_heads=5 does not divide width=768"),
    "timm, shape": (
        other("timm", **{"blocks.1.attn.qkv.weight": (16, 48)}),
        r"blocks\.1\.attn\.qkv\.weight \(checkpoint \(16, 48\), model \(48, 16\)\)",
    ),
    "timm, QuickGELU": (other("timm", architecture="vit_base_patch16_clip_quickgelu_224"), "is not a ViT"),
    "timm, positions": (other("timm", pos_embed=(1, 7, 16)), "the model has 7 position embeddings, expected 4"),
    "timm, crop": (
        other("timm", pretrained_cfg={"input_size": [3, 16, 16], "crop_pct": 1.5}),
        r"crop_pct=1\.5 is not in \[0\.001, 1\]",
    ),
    "ViT, quantized": (quantized, "classifier.weight has numbers of int8; expected float32"),
    "ViT, regression": (other("hf_vit", problem_type="regression"), "problem_type='regression' is not supported"),
    "ViT, type of a value": (other("hf_vit", hidden_size="16"), "hf_vit.*: .*16"),
    "big_vision, names": (old_and_new_name, "Transformer/pos_embedding is another array of pos_embedding"),
    "big_vision, lost chunk": (lost_chunk, "params~cls is not a zarr array, or is damaged"),
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


def test_a_missing_pytorch_is_named_with_the_wheel_without_cuda(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "a.pth").write_bytes(b"\x80\x02}q\x00.")
    install = re.escape('pip install "dcvit[torch]" --extra-index-url https://download.pytorch.org/whl/cpu')
    with refused(CheckpointError, match=f"to read a file of PyTorch: {install}$"):
        open_weights(tmp_path / "a.pth")


def test_pooler_beside_a_classifier_is_not_part_of_the_model(tmp_path):
    """ViTForImageClassification classifies the class token, with any other tensors in its file."""
    shapes = {"vit.pooler.dense.weight": (16, 16), "vit.pooler.dense.bias": (16,)}
    assert "pre_logits" not in open_weights(other("hf_vit", **shapes)(tmp_path)).tree()


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


@pytest.mark.parametrize("max_shard_bytes", [1 << 20, 1000])
def test_the_header_describes_a_folder_without_config(tmp_path, max_shard_bytes):
    """Without the description, names such as those of big_vision are another model."""
    model = image_model()[2]
    write_shards(tmp_path, model.read(), max_shard_bytes=max_shard_bytes, metadata=metadata(model.description))
    weights = open_weights(tmp_path)
    assert (weights.family, weights.description) == ("own", model.description)
    assert set(open_file(tmp_path).tensors) == set(model.params)


GENERATION = "generation_config.json"


@pytest.mark.parametrize(
    ("function", "config", "expected"),
    [
        (families.class_names, {}, ()),
        (families.class_names, {"id2label": {"1": "b", "0": "a", "2": "c"}}, ("a", "b", "c")),
        (families.class_names, {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, ()),
        (
            families.class_names,
            {"label_names": ["n1", "n2", "n3"], "label_descriptions": {"n1": "x", "n3": "y"}},
            ("x", "n2", "y"),
        ),
        (families.class_names, {"pretrained_cfg": {"label_names": {"2": "c"}}}, ("0", "1", "c")),
        (families.class_names, {"id2label": {"0": "a"}}, "id2label={'0': 'a'}; expected a name for each of the 3"),
        (families.end_tokens, {"eos_token_id": 2}, (2,)),
        (families.end_tokens, {"eos_token_id": 2, GENERATION: {"eos_token_id": [1, 0, 70]}}, (1, 0)),
        (families.end_tokens, {"eos_token_id": 2, GENERATION: {}}, (2,)),
        (families.end_tokens, {"eos_token_id": "</s>"}, "eos_token_id='</s>'; expected a token"),
    ],
)
def test_class_names_and_end_tokens_of_other_libraries(function, config, expected):
    if isinstance(expected, tuple):
        assert function(config, 3) == expected
    else:
        with refused(CheckpointError, expected):
            function(config, 3)


def test_null_is_the_default_of_a_key(tmp_path):
    opened = open_weights(other("hf_vit", hidden_act=None, layer_norm_eps=None)(tmp_path))
    assert MODELS["hf_vit"].fields.items() <= opened.description.fields.items()


@pytest.mark.parametrize("resized", [44, 53])
def test_crop_of_an_image_is_read_and_written_for_timm(resized):
    """The fraction is rounded: 40 / (40 / 53) is less than 53."""
    for mode, op in (("squash", f"resize([{resized}, {resized}]"), ("center", f"resize_small({resized}")):
        pp = f'decode|{op}, "bicubic", True)|central_crop(40)|value_range(-1, 1)'
        found = timm_vit.config(Description("vit", 4, FIELDS, pp))["pretrained_cfg"]
        assert (found["crop_mode"], found["crop_pct"]) == (mode, pytest.approx(40 / resized))
        assert timm_vit._pp(found) == pp
