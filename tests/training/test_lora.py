"""Low-rank adapters: the formula, runs that train and save nothing else, their models, and invalid options."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from trained_workdirs import DIGITS, load_params
from training_runs import interrupted_before, refusal, same, same_runs, small_setup, steps_on_meshes

import dcvit
from dcvit import cli, convert, evaluate, train
from dcvit.errors import CheckpointError
from dcvit.hub.saved import open_saved
from dcvit.models.lora import Adaptation
from dcvit.parallel.trees import Tensor
from dcvit.runs import metrics, restoring
from dcvit.weights import adapters

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]

PACKAGED = {"width": 64, "depth": 2, "mlp_dim": 256, "compose": "both", "patch_size": (2, 2)}  # the model "digits"
TARGETS = ".*/(query|value|Dense_0)/kernel"
SHAPES = {  # shapes of A, of B, and of their product as matrices
    "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel": ((6, 2, 4), (6, 2), (2, 8)),
    "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/out/kernel": ((2, 4, 6), (8, 2), (2, 6)),
    "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": ((3, 6, 10), (3, 6, 2), (3, 2, 10)),  # of a scan
    "Transformer/encoderblock/MultiHeadDotProductAttention_0/out/kernel": ((3, 2, 4, 6), (3, 8, 2), (3, 2, 6)),
}


def test_merged_parameters_equal_the_formula():
    rng = np.random.default_rng(0)
    others = {"head/kernel": (6, 9), "head/bias": (9,), "embedding/kernel": (2, 2, 3, 6)}
    base = {name: rng.normal(size=shape).astype("f4") for name, (shape, _, _) in SHAPES.items()}
    base |= {name: rng.normal(size=shape).astype("f4") for name, shape in others.items()}
    tree = unflatten_dict(jax.tree.map(jnp.asarray, base), sep="/")
    lora = Adaptation(2, ".*/(query|out|Dense_0)/kernel", alpha=3.0, whole=("head/bias",))
    trained = flatten_dict(lora.trained(tree, jax.random.key(0)), sep="/")
    wanted = {f"{n}/{x}": s[i] for n, s in SHAPES.items() for i, x in ((1, "lora_a"), (2, "lora_b"))}
    assert {name: x.shape for name, x in trained.items()} == wanted | {"head/bias": (9,)}
    start = lora.merged(tree, unflatten_dict(trained, sep="/"))
    jax.tree.map(np.testing.assert_array_equal, start, tree)
    moved = {name: rng.normal(size=x.shape).astype("f4") for name, x in trained.items()}
    found = flatten_dict(lora.merged(tree, unflatten_dict(jax.tree.map(jnp.asarray, moved), sep="/")), sep="/")
    for name, w in base.items():
        update = np.zeros(())
        if name in SHAPES:
            a, b = (moved[f"{name}/{x}"].astype(np.float64) for x in ("lora_a", "lora_b"))
            update = 3 / 2 * np.einsum("...ir,...ro->...io", a, b).reshape(w.shape)
        np.testing.assert_allclose(found[name], moved[name] if name == "head/bias" else w + update, rtol=1e-5)


def adapt(base, workdir, *words):
    """Train adapters of a run as the command does; return the exit status."""
    options = DIGITS | {"model_init": base, "wd": 0.0, "total_steps": 6, "log_steps": 2, "ckpt_steps": 3}
    options |= {"evals.test.log_steps": 3, "lora.rank": 2, "lora.targets": TARGETS}
    argv = [f"--config.{key}={value}" for key, value in options.items()]
    return cli.run(train.main, ["--config", "vit_digits", "--workdir", str(workdir), *argv, *words])


@pytest.fixture(scope="module")
def adapted(digits_workdir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("adapted") / "run"
    with jax.numpy_dtype_promotion("standard"):
        assert adapt(digits_workdir, workdir) == 0
    return workdir


def test_run_starts_as_its_base_and_saves_the_adapters_only(adapted, digits_workdir):
    before, rows = (metrics.read(workdir / "metrics.jsonl") for workdir in (digits_workdir, adapted))
    assert rows[0]["test/loss"] == pytest.approx(before[-1]["test/loss"], abs=1e-6)
    assert rows[-1]["test/loss"] != rows[0]["test/loss"]
    saved = {name: tuple(array.shape) for name, array in restoring.open_params(adapted).items()}
    assert {name.rsplit("/", 1)[1] for name in saved} == {"lora_a", "lora_b"}
    assert {name.rsplit("/", 3)[1] for name in saved} == {"query", "value", "Dense_0"}
    assert rows[0]["num_params"] == sum(map(np.prod, saved.values()))


def test_loaded_evaluated_and_converted_model_is_the_merged_one(adapted, digits_workdir, capsys):
    base, found = (flatten_dict(load_params(workdir), sep="/") for workdir in (digits_workdir, adapted))
    saved = {name: array.read().result() for name, array in restoring.open_params(adapted).items()}
    assert base.keys() == found.keys()
    for name, w in base.items():
        if f"{name}/lora_a" in saved:
            w = w + (saved[f"{name}/lora_a"] @ saved[f"{name}/lora_b"]).reshape(w.shape)
            assert np.abs(found[name] - base[name]).max() > 0
        np.testing.assert_allclose(found[name], w, atol=1e-6)
    loaded = flatten_dict(jax.device_get(dcvit.load(adapted).params), sep="/")
    exported = {name: tensor.read() for name, tensor in open_saved(adapted).params.items()}
    for name, w in found.items():
        np.testing.assert_array_equal(loaded[name], w)
        np.testing.assert_array_equal(exported[name], w)
    capsys.readouterr()
    assert cli.run(evaluate.main, ["--workdir", str(adapted), "--format", "json"]) == 0
    row = metrics.read(adapted / "metrics.jsonl")[-1]
    assert f"{row['test/top1']:.3f}"[:5] in capsys.readouterr().out


def test_a_soup_of_runs_with_adapters_is_that_of_the_merged_models(adapted, tmp_path):
    early = adapted / "checkpoints" / "3"
    words = [early, adapted, tmp_path / "soup", "--to", "dcvit", "--soup", "uniform"]
    assert cli.run(convert.main, [str(word) for word in words]) == 0
    one, other, found = (flatten_dict(load_params(path), sep="/") for path in (early, adapted, tmp_path / "soup"))
    loaded = flatten_dict(jax.device_get(dcvit.load(tmp_path / "soup").params), sep="/")
    assert any(np.any(one[name] != other[name]) for name in one)
    for name, value in found.items():
        np.testing.assert_allclose(value, (one[name] + other[name]) / 2, atol=1e-7)
        np.testing.assert_array_equal(loaded[name], value)


def test_interrupted_run_resumes_to_the_same_bits(adapted, digits_workdir, tmp_path, monkeypatch):
    with interrupted_before(monkeypatch, 5):
        assert adapt(digits_workdir, tmp_path / "run") == 130
    assert adapt(digits_workdir, tmp_path / "run") == 0
    assert same_runs(adapted, tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "its config has no lora and model_init"),
        ({"lora": {"rank": 2, "targets": ".*"}}, "its config has no lora and model_init"),
        ({"lora": [], "model_init": "x"}, "its config has no lora and model_init"),
        ({"lora": {"rank": "2", "targets": ".*"}, "model_init": "x"}, "rank='2' should be of type int"),
        ({"lora": {"rank": 2, "target": ".*"}, "model_init": "x"}, "did you mean 'targets'"),
    ],
)
def test_a_damaged_description_of_adapters_is_refused(config, message):
    with pytest.raises(CheckpointError, match=message):
        adapters.described({"config": config}, "run")


def test_an_array_of_several_layers_is_read_once_for_its_checksums():
    reads = []

    def tensor(name, *shape):
        array = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
        return Tensor(shape, lambda: reads.append(name) or array)

    shapes = {"Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": (3, 2, 4), "head/bias": (5,)}
    tensors = {name: tensor(name, *shape) for name, shape in shapes.items()}
    expected = {name: adapters.crc(x.read()) for name, x in adapters.single_layers(tensors).items()}
    reads.clear()
    assert len(set(expected.values())) == 4
    assert adapters.layer_checksums(tensors) == expected
    assert reads == [*shapes]
    assert adapters.layer_checksums(tensors, ["head/bias"]) == {"head/bias": expected["head/bias"]}


def test_adapters_of_a_matrix_that_the_base_lacks_are_refused():
    one = Tensor((2, 2), lambda: np.ones((2, 2)))
    about = {"config": {"lora": {"rank": 2, "targets": ".*"}, "model_init": "x"}}
    with pytest.raises(CheckpointError, match="run adapts query/kernel, but it or x lacks a part of it"):
        adapters.merged({"key/kernel": one}, {"query/kernel/lora_a": one, "query/kernel/lora_b": one}, about, "run")


def test_a_scanned_model_with_a_new_head_adapts_an_unrolled_one(digits_workdir, tmp_path):
    words = ["--config.model.scan=True", "--config.model_load.dont_load=['head/.*']", "--config.total_steps=2"]
    assert adapt(digits_workdir, tmp_path / "run", *words) == 0
    saved = {name: tuple(array.shape) for name, array in restoring.open_params(tmp_path / "run").items()}
    assert {"head/kernel", "head/bias"} <= saved.keys()
    assert saved["Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel/lora_a"] == (1, 32, 2)
    params = dcvit.load(tmp_path / "run").params
    head, base = (np.asarray(p["head"]["kernel"]) for p in (params, load_params(digits_workdir)))
    assert np.abs(head - base).max() > 0


def test_a_relative_base_moves_with_its_run_and_a_run_is_not_its_own_base(digits_workdir, tmp_path, monkeypatch):
    shutil.copytree(digits_workdir, tmp_path / "a" / "base")
    monkeypatch.chdir(tmp_path / "a")
    assert adapt("base", "run", "--config.total_steps=1") == 0
    expected = load_params(Path("run"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert same(load_params(tmp_path / "b" / "run"), expected)
    (tmp_path / "b" / "base").rename(tmp_path / "c")
    (tmp_path / "b" / "run").rename(tmp_path / "b" / "base")
    with pytest.raises(CheckpointError, match=r"^\S* adapts config.model_init='base': \S* is its own base$"):
        load_params(tmp_path / "b" / "base")


def test_the_name_of_a_model_of_the_package_is_a_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = [f"--config.model.{key}={value}" for key, value in PACKAGED.items()]
    assert adapt("digits", "run", "--config.total_steps=1", "--config.ema_decay=0", *model) == 0
    base, found = dcvit.load("digits").params, load_params(Path("run"))
    assert same(found["head"], base["head"])


def test_another_base_is_refused(digits_workdir, tmp_path, capsys):
    base = shutil.copytree(digits_workdir, tmp_path / "base")
    assert adapt(base, tmp_path / "run", "--config.total_steps=3", "--config.ckpt_steps=1") == 0
    shutil.rmtree(base / "checkpoints" / "60")  # that of step 30 takes its place
    with pytest.raises(CheckpointError, match=r"adapts another .* than config.model_init has now"):
        dcvit.load(tmp_path / "run")
    capsys.readouterr()
    assert adapt(base, tmp_path / "run", "--config.total_steps=3", "--config.ckpt_steps=1") == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert "config.model_init has another " in err
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"adapts config.model_init='.*base': no checkpoint"):
        dcvit.load(tmp_path / "run")


BAD = {
    "no base": ({"model_init": None}, "config.lora adapts the parameters of config.model_init: set it"),
    "no target": ({"lora.targets": ".*/queri/kernel"}, "config.lora: targets='.*/queri/kernel' matches no parameter"),
    "no matrix": ({"lora.targets": "embedding/kernel"}, "matches embedding/kernel, which is no projection"),
    "high rank": ({"lora.rank": 17}, "rank=17 should be in 1 … 16"),
    "no regex": ({"lora.targets": "("}, "config.lora.targets: '(' is not a regular expression"),
    "whole": ({"lora.whole": ["head/.*"]}, "config.lora has no option 'whole'"),
    "first of a group": (
        {
            "model.depth": 4,
            "model.scan": True,
            "model.compose": "both",
            "model.compose_layers": (1, 3),
            "lora.targets": ".*/layer_0/.*/(query|value)/kernel",
        },
        "matches none of the last of the 2 layers that a scan repeats",
    ),
    "decay of kernels": ({"wd": 0.1}, "wd_mults: '.*/kernel' matches no parameter"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_line(name):
    overrides, message = BAD[name]
    usual = {"model_init": "absent", "lora.rank": 2, "lora.targets": TARGETS, "wd": 0.0}
    options = {k: v for k, v in (usual | overrides).items() if not ("lora" in overrides and "lora." in k)}
    assert message in refusal(small_setup, **options)


def test_sharded_adapters_train_as_on_one_device():
    """The base is sharded as parameters are, and no step changes it."""
    options = {"model_init": "absent", "lora.rank": 2, "lora.targets": TARGETS, "wd": 0.0, "lr": 0.01}
    options |= {"model.num_heads": 4, "model.mlp_dim": 32, "input.batch_size": 16, "optax_name": "trace"}
    options |= {"optax": {"decay": 0.0}, "schedule": {"decay_type": "constant"}, "model.head_zeroinit": False}
    states = []
    for before, state in steps_on_meshes(2, **options):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.base), before.base)
        states.append(state)
    for one, many in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-5)
    kernel = states[1].base["Transformer"]["encoderblock_0"]["MlpBlock_0"]["Dense_0"]["kernel"]
    assert {"fsdp", "tensor"} <= {name for axis in kernel.sharding.spec for name in np.ravel(axis)}
