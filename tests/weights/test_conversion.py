"""Conversions are bitwise or within the tolerance, and leave nothing behind when they fail."""

import ast
import contextlib
import dataclasses
import errno
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conversion_models
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from conversion_models import open_saved
from small_models import stack_blocks
from trained_workdirs import load_params

import dcvit
from dcvit import cli, convert
from dcvit.errors import CheckpointError
from dcvit.hub.source import find
from dcvit.models import lm, vit
from dcvit.models.fields import TRAINING_ONLY_FIELDS
from dcvit.runs import checksums
from dcvit.runs.checkpointer import Checkpointer
from dcvit.weights import dcvit_hf, preprocessing, timm_vit
from dcvit.weights.export import card, check, conversion, formats
from dcvit.weights.family import Description, build
from dcvit.weights.tensors import Tensor


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """Compile the comparison of each model once: conversions keep that of the newest model only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_compiled", functools.cache(check._compiled.__wrapped__))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language model and a vision transformer, as folders to convert."""
    root = tmp_path_factory.mktemp("models")
    text = conversion_models.language_model(depth=1, end_of_text=3)[2]
    return {
        "lm": conversion_models.write(text, root / "lm"),
        "vit": conversion_models.write(conversion_models.image_model(depth=1)[2], root / "vit"),
    }


def plain_image_model():
    return conversion_models.image_model(compose=None, pool_type="tok", depth=1)[2]


def values(path):
    return dict(open_saved(path).read())


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["npz", "safetensors", "dcvit"])
@pytest.mark.parametrize("name", ["lm", "vit"])
def test_every_own_format_is_read_back_bitwise(name, to, folders, tmp_path):
    report = conversion_models.convert(folders[name], tmp_path / "out", to)
    assert report.difference == 0
    assert same_bits(values(tmp_path / "out"), values(folders[name]))
    assert build(open_saved(tmp_path / "out").description) == build(open_saved(folders[name]).description)


@pytest.mark.slow
def test_a_changed_bit_in_a_converted_model_is_found_by_every_reader(folders, tmp_path):
    """But for the card, which its author completes. The Hub's downloads leave code out, and nothing here runs it."""
    folder = tmp_path / "out"
    conversion_models.convert(folders["vit"], folder, "hf")
    for path in [path for path in folder.rglob("*") if path.is_file() and path.name != checksums.WEIGHTS]:
        data = path.read_bytes()
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        if path.name == card.CARD:
            open_saved(folder)
            continue
        for read in (dcvit.load, open_saved, find):
            with pytest.raises(CheckpointError, match=rf"{folder} is damaged: .*remove its checksums.sha256"):
                read(folder)
        path.unlink()
        with contextlib.nullcontext() if path.suffix == ".py" else pytest.raises(CheckpointError, match="is damaged"):
            open_saved(folder)
        path.write_bytes(data)


def test_an_npz_file_alone_describes_its_model_or_the_assumptions_are_logged(tmp_path, caplog):
    """big_vision takes the keys below params/."""
    model = conversion_models.image_model(depth=1, compose=None, mlp="gelu", norm_epsilon=1e-3)[2]
    conversion_models.write(model, tmp_path / "npz", "npz")
    with np.load(tmp_path / "npz" / "params.npz") as loaded:
        found = {k.removeprefix("params/"): loaded[k] for k in loaded if k.startswith("params/")}
        assert {k for k in loaded if not k.startswith("params/")} == {"dcvit"}
    assert same_bits(found, dict(model.read()))
    moved = shutil.move(tmp_path / "npz" / "params.npz", tmp_path / "moved.npz")
    assert build(open_saved(moved).description) == build(model.description)
    assert "assumed" not in caplog.text
    np.savez(tmp_path / "other.npz", **{f"params/{name}": array for name, array in model.read()})
    with caplog.at_level("INFO", "dcvit"):
        assert open_saved(tmp_path / "other.npz").description.fields.keys().isdisjoint({"mlp", "norm_epsilon"})
    assert "assumed: mlp='gelu_tanh', norm_epsilon=1e-06" in caplog.text


def test_other_pixels_of_the_written_preprocessing_are_a_warning(caplog):
    pytest.importorskip("tensorflow")  # which resizes images
    model = plain_image_model()
    for pp, warns in (("decode|resize_pillow(64)", False), ("decode|resize(64)", True)):
        described = model.description._replace(pp=f"{pp}|value_range(-1, 1)")
        largest, mean = conversion._pixels(model._replace(description=described), "hf")
        assert ("pixels of a photo by the written settings differ" in caplog.text) == warns
        assert (largest > 5, mean > conversion.LEVEL) == (warns, warns)


def headless(fields):
    """Return a vision transformer without its head."""
    model = conversion_models.image_model(depth=1, **fields)[2]
    params = {name: x for name, x in model.params.items() if not name.startswith("head/")}
    return model._replace(params=params, description=model.description._replace(num_outputs=None))


@pytest.mark.interop
@pytest.mark.parametrize(
    "fields", [{"pool_type": "map"}, dict(compose=None, pool_type="tok", mlp="gelu", rep_size=True)]
)
def test_the_card_of_a_model_without_a_head_loads_it(fields, tmp_path, monkeypatch, capsys, library_promotion):
    skip_without("torch", "transformers")
    import transformers

    source = conversion_models.write(headless(fields), tmp_path / "source")
    assert conversion_models.convert(source, tmp_path / "out", "hf").result == "transformers"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path / "out")
    capsys.readouterr()
    for code in snippets_of(tmp_path / "out"):
        exec(code, {})
    printed = capsys.readouterr()
    assert printed.out == "torch.Size([1, 32])\n"
    assert "MISSING" not in printed.err  # of random weights


@pytest.mark.slow
def test_layers_one_at_a_time_have_the_logits_of_the_whole_model():
    net, params, model = conversion_models.language_model(window_pattern="1:1", tied=True, end_of_text=5)
    tokens = check.inputs(model)
    whole = small_models.logits_of(net, params, jnp.asarray(tokens))
    assert np.abs(check.by_dcvit(model, tokens) - whole).max() < 1e-5


LIBRARIES = {
    "hf": ("torch", "transformers"), "onnx": ("jax2onnx", "onnxruntime"), "stablehlo": (), "timm": ("torch", "timm"),
}  # fmt: skip


def skip_without(*names):
    for name in names:
        pytest.importorskip(name, reason=f"needs {name}; pip install -e .[interop]", exc_type=Exception)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "to"), [
    pytest.param(name, to, marks=pytest.mark.interop if needed else ())
    for to, needed in LIBRARIES.items() for name in ("vit", "lm") if name == "vit" or to == "hf"
])  # fmt: skip
def test_other_libraries_evaluate_the_result_and_the_card_loads_it(name, to, folders, tmp_path):
    skip_without(*LIBRARIES[to])
    source, out = folders[name], tmp_path / "out"
    if to == "timm":
        source = conversion_models.write(plain_image_model(), tmp_path / "plain")
    # In a process of its own: the libraries trace with values that the executed annotations of tests refuse.
    argv = [sys.executable, "-m", "dcvit.convert", str(source), str(out), "--to", to]
    process = subprocess.run(argv, env=environment(), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("\n") == 1
    found = re.search(r"logits: (\S+) \(at most (\S+)\); source evaluated by dcvit, result by ([\w.]+)", process.stdout)
    assert float(found[1]) < 2e-5 * (float(found[2]) / conversion.TOLERANCE)
    assert found[3] in ("transformers", "onnxruntime", "jax.export", "timm")
    for code in snippets_of(out):
        env = environment(HF_MODULES_CACHE=str(tmp_path / "modules"))
        process = subprocess.run([sys.executable, "-c", code], cwd=out, env=env, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert process.stdout.strip()


def environment(**variables):
    """Return the variables of a process that can import transformers and timm; see tests/weights/site."""
    folders = [str(Path(__file__).with_name("site")), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **variables}


def snippets_of(folder):
    """Return the Python code of a model card, which a user runs in its folder."""
    snippets = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert snippets
    return snippets


def test_the_card_describes_run_data_metrics_and_load(digits_workdir, tmp_path, capsys, monkeypatch):
    assert cli.run(convert.main, [str(digits_workdir), str(tmp_path / "out"), "--to", "safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "largest difference of logits: 0.0e+00" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    last = json.loads((digits_workdir / "metrics.jsonl").read_text().splitlines()[-1])
    for text in ("## Load", "| kind | digits |", f"| step | {last['step']} |", "| width | 32 |", "# license"):
        assert text in card
    scanned = load_params(digits_workdir)  # the averaged parameters
    found = values(tmp_path / "out")
    np.testing.assert_array_equal(found["embedding/kernel"], scanned["embedding"]["kernel"])
    monkeypatch.chdir(tmp_path / "out")
    for code in snippets_of(tmp_path / "out"):
        exec(code, {})
    assert "ViT(" in capsys.readouterr().out


@pytest.mark.slow
def test_scanned_layers_and_a_run_without_a_head_are_read(tmp_path):
    """A scan over groups of layers, with a rest. Without a head num_classes is 0, for which descriptions have None."""
    _, params, model = conversion_models.language_model(window_pattern="1:1", depth=3)
    fields = {**model.description.fields, "scan": True}
    write_run(tmp_path / "text", model, stack_blocks(params, 2), model=fields)
    assert same_bits(values(tmp_path / "text"), dict(model.read()))
    _, params, model = conversion_models.image_model(depth=1)
    write_run(tmp_path / "run", model, {name: x for name, x in params.items() if name != "head"}, num_classes=0)
    assert conversion_models.convert(tmp_path / "run", tmp_path / "out", "safetensors").difference == 0
    assert open_saved(tmp_path / "out").description.num_outputs is None


def write_run(folder, source, params, **config):
    """Write a workdir with the parameters of a model in another tree, and other values in its config."""
    conversion_models.write(source, folder, "dcvit")
    config = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(folder / "checkpoints")
    checkpointer = Checkpointer(folder)
    checkpointer.save(0, {"params": params}, {"config": config})
    checkpointer.close()


def test_a_comparison_of_equal_logits_is_a_warning(tmp_path, caplog):
    """The head of a new model is zero, with any other parameters."""
    model = conversion_models.image_model(depth=1)[2]
    zeros = {name: np.zeros(model.params[name].shape, np.float32) for name in ("head/kernel", "head/bias")}
    model.params.update((name, Tensor(x.shape, lambda x=x: x)) for name, x in zeros.items())
    source = conversion_models.write(model, tmp_path / "source")
    conversion_models.convert(source, tmp_path / "out", "npz")
    assert f"all logits of {source} are equal" in caplog.text


def write_other_values(model, folder):
    """Write a .npz file that differs from the source."""
    path = next(iter(model.params))
    tensor = model.params[path]
    changed = Tensor(tensor.shape, lambda: tensor.read() * 1.1)
    formats.write_npz(model._replace(params={**model.params, path: changed}), folder)


def full_disk(model, folder):
    (folder / "params.npz").write_bytes(b"a part")
    raise OSError(errno.ENOSPC, "No space left on device")


def not_finite(source, patch):
    model = conversion_models.language_model(window_pattern="1:1")[2]
    nan = np.full(model.params["embedding/embedding"].shape, np.nan, np.float32)
    model.params["embedding/embedding"] = Tensor(nan.shape, lambda: nan)
    shutil.rmtree(source)
    conversion_models.write(model, source)


BROKEN = {  # what is made wrong in the source or by a patch, the format, and a part of the message
    "existing target": (lambda source, patch: (source.parent / "out").mkdir(), "npz", "out exists"),
    "another value": (
        lambda source, patch: patch.setitem(conversion.WRITERS, "npz", write_other_values), "npz",
        "largest difference of logits",
    ),
    "source not a number": (
        not_finite, "npz", "lm: embedding/embedding has numbers that are not finite in float32, such as nan",
    ),
    "onnx of a language model": (None, "onnx", "onnx is for models of images"),
    "stablehlo of a language model": (None, "stablehlo", "stablehlo is for models of images"),
    "full disk": (lambda source, patch: patch.setitem(conversion.WRITERS, "npz", full_disk), "npz", "No space left"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_failures_are_one_line_and_leave_nothing(case, folders, tmp_path, monkeypatch, capsys):
    break_source, to, message = BROKEN[case]
    source = shutil.copytree(folders["lm"], tmp_path / "lm")
    if break_source:
        break_source(source, monkeypatch)
    before = set(tmp_path.iterdir())
    status = cli.run(convert.main, [str(source), str(tmp_path / "out"), "--to", to])
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert message in error
    assert set(tmp_path.iterdir()) == before


NATIVE = {
    "gpt2": dict(preset="Transformer-405M", compose=None),
    "llama": dict(preset="Transformer++-405M", num_key_heads=2),
    "gpt_neox": dict(preset="Pythia-2.8B"),
    "vit": dict(compose=None, pool_type="tok", mlp="gelu"),
}


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("kind", NATIVE)
def test_plain_models_become_native_classes_and_come_back_bitwise(kind, tmp_path):
    skip_without("torch", "transformers")
    make = conversion_models.language_model
    if kind == "vit":
        make = functools.partial(conversion_models.image_model, (8, 32, 3))  # not square
    source = conversion_models.write(make(**NATIVE[kind])[2], tmp_path / "source")
    report = conversion_models.convert(source, tmp_path / "hf", "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == kind
    assert not (tmp_path / "hf" / "modeling_dcvit.py").exists()
    assert report.result == "transformers"
    assert report.difference < 2e-5 * (report.allowed / conversion.TOLERANCE)
    back = conversion_models.convert(tmp_path / "hf", tmp_path / "run", "dcvit")
    assert back.source == "transformers"
    assert back.difference == pytest.approx(report.difference, abs=1e-6)
    assert same_bits(values(tmp_path / "run"), values(source))


def test_gray_images_stay_gray():
    pp = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)"
    fields = dict(width=8, depth=1, mlp_dim=16, num_heads=2, pool_type="gap", patch_size=(4, 4))
    assert timm_vit.config(Description("vit", 10, fields, pp))["pretrained_cfg"]["input_size"] == [1, 8, 8]
    found = preprocessing.to_pp(preprocessing.from_pp(pp))
    assert found == 'decode(1)|resize(8, "bilinear", True)|value_range(-1, 1)'


def test_the_usual_preprocessing_is_assumed_only_if_none_is_named(folders, tmp_path, caplog):
    """Files of big_vision hold no size, which the native classes of other libraries need."""
    arrays = {f"params/{k}": v for k, v in plain_image_model().read()}
    np.savez(tmp_path / "params.npz", **arrays)
    with caplog.at_level("INFO", "dcvit"):
        model = open_saved(tmp_path / "params.npz")
    assert (model.family, model.description.pp) == ("big_vision", "decode|resize(16)|value_range(-1, 1)")
    assert "names no preprocessing" in caplog.text
    assert timm_vit.config(model.description)["model_args"]["img_size"] == [16, 16]
    assert open_saved(folders["vit"]).description.pp == conversion_models.PP


@pytest.mark.parametrize(("net", "outputs"), [(vit.ViT, "num_classes"), (lm.LM, "vocab_size")])
def test_the_modeling_file_has_all_fields_but_those_of_training(net, outputs):
    """A field of training, such as the initial bias of the head, prevents no export; those that are refused do."""
    names = {field.name for field in dataclasses.fields(net)}
    refused = {"compose_layers", "compose_window"}
    in_file = dcvit_hf.FIELDS["lm" if net is lm.LM else "vit"]
    assert names - {"parent", "name", outputs, *refused, *TRAINING_ONLY_FIELDS} == in_file.keys()


def test_the_modeling_file_imports_torch_and_transformers_only():
    found, file = set(), importlib.util.find_spec("dcvit.weights.modeling_dcvit").origin
    for node in ast.walk(ast.parse(Path(file).read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[0] for name in [*names, *([node.module] if isinstance(node, ast.ImportFrom) else [])]}
    assert found - set(sys.stdlib_module_names) == {"torch", "transformers"}


@pytest.mark.interop
def test_code_of_a_folder_is_never_executed(tmp_path):
    skip_without("torch", "transformers")
    config = {"model_type": "other", "auto_map": {"AutoConfig": "evil.C", "AutoModelForImageClassification": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.raises(CheckpointError, match="contains custom code"):
        check.by_transformers(plain_image_model(), tmp_path, np.zeros((1, 4, 4, 3), np.float32))
