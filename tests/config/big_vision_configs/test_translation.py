"""Config files of big_vision: the translation of each key, keys without equivalent, and runs of translated configs."""

import ast
import importlib
import json
import logging
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import input_pipeline as ip
from dcvit.config import big_vision
from dcvit.config import load as configs
from dcvit.errors import ConfigError
from dcvit.training import setup
from input_pipeline.preprocess.builder import calls

FOLDER = Path(__file__).parent / "configs"
PRETRAIN, FINETUNE = FOLDER / "pretrain.py", FOLDER / "finetune.py"
PETS = {"pets": ("oxford_iiit_pet", "train", "test")}
BASE = {
    "input": {
        "data": {"name": "cifar10", "split": "train"},
        "batch_size": 512,
        "pp": "decode|value_range(-1, 1)|onehot(10, key='label', key_result='labels')",
    },
    "num_classes": 10,
    "total_steps": 100,
    "model": {"variant": "S/16"},
    "optax_name": "scale_by_adam",
    "loss": "softmax_xent",
    "lr": 0.5,
    "wd": 0.25,
    "schedule": {"decay_type": "cosine"},
}
EVALUATOR = {"type": "classification", "data": {"name": "cifar10", "split": "test"}, "pp_fn": "decode|onehot(10)"}
FEWSHOT = {"datasets": PETS, "pp_train": "decode", "pp_eval": "decode", "shots": [1, 5], "l2_reg": 2.0}


def merged(changes):
    """BASE with dotted keys replaced; the value None removes a key, as in big_vision."""
    config = json.loads(json.dumps(BASE))
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = config
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return config


def value_at(config, path):
    """The value of a dotted key; None if there is none."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


DIGITS = {
    "input.data": {"kind": "digits", "split": "train"},
    "input.batch_size": 64,
    "input.pp": "value_range(-1, 1, key='image')|onehot(10, key='label', key_result='labels')|keep('image', 'labels')|",
    "total_steps": 3,
    "model": {"patch_size": (4, 4), "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16},
    "loss": None,
    "init_head_bias": -2.3,
    "log_training_steps": 1,
    "mixup": {"p": 0.2},
    "wd": None,
    "optax_name": "big_vision.momentum_hp",
    "lr": 0.01,
    "schedule": {"decay_type": "cosine", "warmup_percent": 0.3},
    "evals": {
        "test": {
            "type": "classification",
            "data": {"kind": "digits", "split": "test"},
            "pp_fn": "value_range(-1, 1)|onehot(10, key='label', key_result='labels')|keep('image', 'labels')",
            "log_percent": 0.5,
        }
    },
}


TRANSLATED = [
    ({"log_training_steps": 50}, {"log_steps": 50, "log_training_steps": None},
     "log_training_steps -> log_steps"),
    ({"ckpt_percent": 1, "keep_ckpt_steps": 5}, {"ckpt_percent": 100, "keep_ckpt_steps": 5}, "ckpt_percent=1 ->"),
    ({"loss": None}, {"loss": "sigmoid_xent"}, "big_vision's default -> loss='sigmoid_xent'"),
    ({"mixup": {"p": 0.2, "fold_in": None}}, {"mixup": 0.2}, "mixup=dict(p=0.2) -> mixup=0.2"),
    ({"init_head_bias": -6.9}, {"model.head_bias_init": -6.9}, "config.init_head_bias -> head_bias_init=-6.9"),
    ({"model.scan": True}, {"model.remat": "nothing_saveable"}, "remat_policy='none' -> remat='nothing_saveable'"),
    ({"model.scan": True, "model.remat_policy": "dots_saveable"},
     {"model.remat": "dots_saveable", "model.remat_policy": None}, "remat_policy='dots_saveable' -> remat='dots_sav"),
    ({"input.cache_raw": True}, {"input.data.cache": True, "input.cache_raw": None}, "cache_raw -> cache=True"),
    ({"input.shuffle_buffer_size": 9, "input.prefetch": 8, "input.num_parallel_calls": 4},
     {"input.shuffle_buffer_size": None, "input.prefetch": None, "input.num_parallel_calls": None},
     "config.input: shuffle_buffer_size is dropped: it has no effect"),
    ({"schedule": {"decay_type": "rsqrt", "timescale": 1024, "warmup_examples": 5, "cooldown_percent": 0.5}},
     {"schedule": {"decay_type": "rsqrt", "timescale": 1024, "warmup_examples": 5, "cooldown_percent": 50.0}},
     "cooldown_percent=0.5 -> cooldown_percent=50.0"),
    ({"optax_name": "big_vision.momentum_hp", "optax": {"momentum": 0.8, "nesterov": True}},
     {"optax_name": "trace", "optax": {"decay": 0.8, "accumulator_dtype": "bfloat16", "nesterov": True}},
     "optax_name='big_vision.momentum_hp' -> optax_name='trace'"),
    ({"sharding_strategy": [(".*", 'fsdp(axis="data")')],
      "sharding_rules": [("act_batch", "data")]},
     {"mesh": [("fsdp", -1)], "sharding_strategy": "fsdp"}, "mesh=[('data', -1)] -> mesh=[('fsdp', -1)]"),
    ({"evals": {"val": {**EVALUATOR, "loss_name": "sigmoid_xent", "log_percent": 0.1, "prefix": "z/"}}},
     {"evals.val": {"type": "classification", "data": {"kind": "tfds", "name": "cifar10", "split": "test"},
                    "loss": "sigmoid_xent", "log_percent": 10.0,
                    "pp": "decode()|onehot(10, key='labels', key_result=None)"}},
     "config.evals.val: loss_name -> loss"),
    ({"evals": {"z": {**FEWSHOT, "type": "fewshot_lsr", "representation_layer": "encoded"}}},
     {"evals": {"z_pets": {
         "type": "fewshot", "pp": "decode", "representation": "encoded", "shots": [1, 5], "l2_reg": 2.0,
         "data": {"kind": "tfds", "name": "oxford_iiit_pet", "split": "train"},
         "test_data": {"kind": "tfds", "name": "oxford_iiit_pet", "split": "test"}}}},
     "config.evals.z: datasets -> the evaluators z_pets"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected", "note"), TRANSLATED, ids=lambda value: str(value)[:40])
def test_key_is_translated_and_noted(changes, expected, note):
    config, notes = big_vision.translate(merged(changes))
    assert {path: value_at(config, path) for path in expected} == expected
    assert note is None or any(note in line for line in notes), notes
    assert all("\n" not in line and len(line) < 250 for line in notes)


REFUSED = [
    ({"input.pp": "decode|onehot(10"}, "InputError: preprocessing: cannot parse"),
    ({"mixup": {"p": 0.2, "fold_in": "data"}}, "config.mixup.fold_in='data' of big_vision has no equivalent"),
    ({"schedule": {"warmup_percent": 20}}, "config.schedule.warmup_percent=20 should be in [0, 1]"),
    ({"schedule": [("head/.*", {}), (".*", None)]}, "should be a dict"),
    ({"evals": {"a": FEWSHOT | {"type": "fewshot_lsr", "pp_eval": "pad(1)"}}}, "it should equal pp_eval"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_key_without_equivalent_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        big_vision.translate(merged(changes))
    assert "\n" not in str(error.value)


def test_refusal_names_the_file_and_unknown_keys_are_errors(tmp_path):
    def load(**changes):
        config = merged({"log_training_steps": 5, **changes})
        text = f"import ml_collections as mlc\ndef get_config():\n  return mlc.ConfigDict({config!r})\n"
        (tmp_path / "mine.py").write_text(text)
        return configs.load(str(tmp_path / "mine.py"))

    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}/mine\.py: config\.mixup\.n=3 of big_vision"):
        load(mixup={"p": 0.1, "n": 3})
    for key in ("resume", "gsam"):
        with pytest.raises(ConfigError, match=rf"mine\.py: unknown key 'config\.{key}'"):
            load(**{key: {"rho": 0.1}})
    assert load().log_steps == 5


def test_recipe_in_big_visions_form_equals_the_shipped_config():
    """`configs/vit_i1k.py` is the recipe of big_vision's vit_s16_i1k.py, written for dcvit."""
    theirs = configs.load(str(PRETRAIN)).to_dict()
    ours = configs.load("vit_i1k:variant=S/16", ["input.data.cache=true"]).to_dict()
    for config in (theirs, ours):
        config["evals"] = {name: config["evals"][name] for name in ("train", "minival", "val", "real")}
        for holder in (config["input"], *config["evals"].values()):
            holder["pp"] = [ast.unparse(op) for op in calls(holder["pp"])]
            holder.pop("optional", None)
            holder.setdefault("loss", config["loss"])
        config["pp_predict"] = big_vision.without_labels(config["pp_predict"])
        config["optax"] = {"b1": 0.9, "b2": 0.999} | config["optax"]
        config["schedule"] = {"end": 0.0} | config["schedule"]
    assert ours["model"].pop("dtype_mm") == "auto"  # theirs is float32
    assert theirs == ours


def test_overrides_set_translated_keys_and_arguments_are_those_of_the_file():
    config = configs.load(f"{PRETRAIN}:variant=DCViT-Ti/16,aug=none,res=112", ["mixup=0.5", "model.rank=1"])
    assert (config.mixup, config.model.rank, config.model.variant) == (0.5, 1, "DCViT-Ti/16")
    assert "decode_jpeg_and_inception_crop(112)|flip_lr||" in config.input.pp
    assert configs.load(f"{PRETRAIN}:runlocal").total_steps == 2
    pets = configs.load(f"{PRETRAIN}:fewshot,runlocal,res=64").evals.fewshot_pets
    assert (pets.shots, pets.representation, pets.log_steps) == ((1, 5, 10, 25), "pre_logits", 25_000)
    assert pets.pp.startswith("decode|resize(73)|central_crop(64)|")
    assert configs.load(f"{PRETRAIN}:B/32").model.variant == "B/32"
    with pytest.raises(ConfigError, match=r"pretrain\.py: ValueError: no argument 'varient'; did you mean 'variant'"):
        configs.load(f"{PRETRAIN}:varient=B/32,aug=none")


def test_fine_tuning_recipe():
    config = configs.load(f"{FINETUNE}:fsdp,init=x.npz")
    assert (config.model_init, config.model_load.dont_load) == ("x.npz", ["head/kernel", "head/bias"])
    assert (config.optax_name, config.optax.to_dict()) == ("trace", {"decay": 0.9, "accumulator_dtype": "bfloat16"})
    assert (config.wd, config.mixup, config.ckpt_percent) == (0.0, 0.0, 25)
    assert config.schedule.to_dict() == {"decay_type": "cosine", "warmup_percent": 20}
    assert (config.mesh, config.sharding_strategy) == ([("fsdp", -1)], "fsdp")
    assert config.model.to_dict() == {"variant": "B/32", "pool_type": "tok", "scan": True, "remat": "nothing_saveable"}


def test_half_precision_momentum_has_the_same_updates(library_promotion):
    reference = optax.trace(0.9, accumulator_dtype=jnp.bfloat16)
    config, _ = big_vision.translate(merged({"optax_name": "big_vision.momentum_hp"}))
    ours = getattr(optax, config["optax_name"])(**config["optax"])
    params = {"w": jnp.zeros(5)}
    states = [transformation.init(params) for transformation in (ours, reference)]
    for step in range(3):
        grads = {"w": jax.random.normal(jax.random.key(step), (5,))}
        (a, states[0]), (b, states[1]) = ours.update(grads, states[0]), reference.update(grads, states[1])
        np.testing.assert_array_equal(a["w"], b["w"])


def test_onehot_keeps_big_visions_default_keys():
    """`onehot(4)` replaces `labels`, and `onehot(4, key="label")` replaces `label`."""

    def translated(pp):
        holder = big_vision.Part({"pp": pp}, "config.input", [])
        return big_vision.translate_pp(holder, "pp"), [*holder.notes]

    def apply(pp, **example):
        found = ip.Preprocess(translated(pp)[0])(example, np.random.default_rng(0))
        return {key: np.asarray(value).tolist() for key, value in found.items()}

    assert apply("onehot(4)", label=1, labels=2) == {"label": 1, "labels": [0, 0, 1, 0]}
    assert apply("onehot(4, key='label')|", label=1) == {"label": [0, 1, 0, 0]}
    assert apply("onehot(2, 'label', 'b', on=3)", label=1) == {"label": 1, "b": [0, 3]}
    unchanged = 'decode||onehot(1000, key="label", key_result="labels")|'
    assert translated(unchanged) == (unchanged, [])
    assert translated(None) == ("", [])
    assert translated("onehot(4)")[1] == ["config.input: onehot in pp -> onehot with big_vision's default keys"]


def test_configs_of_dcvit_are_not_translated(monkeypatch):
    needed = {
        "transfer": "init=x,dataset=cifar10", "vit_folder": "data_dir=x", "lm_text": "data_dir=x",
        "vit_manifest": "manifest=x",
    }  # fmt: skip
    monkeypatch.setattr(big_vision, "translate", lambda config: pytest.fail("translated"))
    for path in configs.shipped():
        if path.stem != "upcycle":  # whose config is that of a run
            configs.load(f"{path}:{needed.get(path.stem, '')}")


@pytest.mark.slow
def test_setup_of_a_translated_config(tmp_path, caplog, library_promotion):
    caplog.set_level(logging.INFO, "dcvit")
    text = f"import ml_collections as mlc\ndef get_config(arg=None):\n  return mlc.ConfigDict({merged(DIGITS)!r})\n"
    (tmp_path / "mine.py").write_text(text)
    made = setup.make_setup(configs.load(str(tmp_path / "mine.py")))
    assert "mine.py: config: mixup=dict(p=0.2) -> mixup=0.2\n" in caplog.text
    assert "mine.py: config.evals.test: log_percent=0.5 -> log_percent=50.0\n" in caplog.text
    assert not big_vision.is_big_vision(made.record)
    assert (made.plan.total_steps, made.plan.intervals.log, made.plan.intervals.evals) == (3, 1, {"test": 2})
    assert (made.model.module.head_bias_init, made.task.loss_name) == (-2.3, "sigmoid_xent")
    assert made.task.augmentation.mixup == 0.2
    assert made.evaluators["test"].options.loss == "sigmoid_xent"
    assert [float(made.plan.schedule(step)) for step in (0, 1, 3)] == [0.0, 1.0, 0.0]


SPEC = {"variant": "B/16", "res": (224, int), "lr": 0.1, "runlocal": False, "ckpt": None}


def test_text_is_parsed_by_the_types_of_the_defaults():
    defaults = {"variant": "B/16", "res": 224, "lr": 0.1, "runlocal": False, "ckpt": None}
    for text, expected in (
        ("S/32", {"variant": "S/32"}),
        ("runlocal,res=128", {"runlocal": True, "res": 128}),
        ("runlocal=False,lr=1", {"runlocal": False, "lr": 1.0}),
    ):
        assert big_vision.parse_arg(text, **SPEC).to_dict() == defaults | expected
    with pytest.raises(ValueError, match="invalid literal for int"):
        big_vision.parse_arg("res=x", **SPEC)


def test_modules_can_be_imported_while_a_config_is_loaded_only(tmp_path):
    with big_vision.importable():
        assert importlib.import_module("big_vision.configs.common").parse_arg is big_vision.parse_arg
    assert not [name for name in sys.modules if name.startswith("big_vision")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("big_vision.configs.common")
    for line in ("import big_vision.utils", "from big_vision.configs.common import absent", "raise KeyError('x')"):
        (tmp_path / "broken.py").write_text(f"import big_vision.configs.common\n{line}\n")
        with pytest.raises(ConfigError, match=r"broken\.py: ") as error:
            configs.load(str(tmp_path / "broken.py"))
        assert "\n" not in str(error.value)
        assert not [name for name in sys.modules if name.startswith("big_vision")]
