"""The setup of a run: invalid and contradictory configs, and the objects built from a valid one."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest
from trained_workdirs import TINY
from training_runs import LM_TINY, small_setup

from dcvit.config import load as configs
from dcvit.dcmha import device
from dcvit.errors import CheckpointError, ConfigError, InputError
from dcvit.hub import kinds
from dcvit.training import setup

pytestmark = pytest.mark.usefixtures("library_promotion")


BAD = {
    "batch": ({"input.batch_size": 60}, "is not a positive multiple of grad_accum 1 × fsdp 1 × data 8 devices"),
    "classes": ({"num_classes": 11}, "yields 10 classes, config.num_classes=11"),
    "integer image": ({"input.pp": "onehot(10)"}, "add value_range(-1, 1)"),
    "evaluator image": ({"evals.test.pp": "resize_pillow(4)|value_range|onehot(10)"}, "yields images of (4, 4, 1)"),
    "corrupt of an evaluator": (
        {"evals.test.corrupt": "skip"},
        "config.evals.test.corrupt: moved in 0.3.0; config.input.corrupt is for training and evaluation",
    ),
    "no total": ({"total_steps": 0}, "set one of total_steps"),
}


def test_missing_data_of_an_evaluator_is_named_by_its_key_and_skipped_if_optional(caplog):
    missing = {"evals.test.data": {"kind": "folder", "data_dir": "/nowhere"}}
    with pytest.raises(
        InputError, match=r"^config\.evals\.test: no folder .*; config\.evals\.test\.optional=True skips it"
    ):
        make(**missing)
    assert make(**missing, **{"evals.*.optional": True}).evaluators == {}
    assert "config.evals.test: skipped, no folder /nowhere" in caplog.text


def make(config="vit_digits", tiny=TINY, **overrides):
    """Build the setup of a tiny config with overrides; load initial parameters if the config names some."""
    words = [f"{key}={value}" for key, value in {**tiny, **overrides}.items()]
    made = setup.make_setup(configs.load(config, words))
    if made.model.load_initial:
        made.model.load_initial(made.model.shapes)
    return made


BAD_TEXT = {
    "context above the model's": ({"model.context": 8}, "config.model.context=8 is less than the data's 24"),
    "images for a language model": ({"input.data": {"kind": "digits"}}, "holds no text"),
}


@pytest.mark.parametrize("name", [*BAD, *(pytest.param(name, marks=pytest.mark.slow) for name in BAD_TEXT)])
def test_invalid_config_is_one_line_that_names_key_and_value(name):
    config, tiny = ("lm_stdlib", LM_TINY) if name in BAD_TEXT else ("vit_digits", TINY)
    overrides, message = (BAD | BAD_TEXT)[name]
    with pytest.raises((ConfigError, InputError, CheckpointError)) as error:
        make(config, tiny, **overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_that_requires_fused_attention_is_refused_without_it_on_accelerators(monkeypatch):
    overrides = {"model.depth": 1, "model.implementation": "blockwise", "require_fused": True}
    make(**overrides)  # on a CPU
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    with pytest.raises(ConfigError, match=r"^config.model: attention is not fused: blockwise on gpu for float32"):
        make(**overrides)


def test_setup_is_frozen_and_holds_the_complete_config():
    made = make(num_classes="none")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.config = {}
    assert made.record["num_classes"] == made.model.module.num_classes == 10
    assert json.loads(json.dumps(made.record)) == made.record
    assert set(made.record) >= set(configs.KEYS)
    assert made.plan.intervals.evals == {"test": 3}
    assert made.plan.total_steps == 6


@pytest.mark.slow
def test_model_of_a_setup_has_the_properties_of_its_text():
    text = make("lm_stdlib", LM_TINY, vocab_size="none", document_mask=True).model.module
    assert (text.vocab_size, text.context, text.end_of_text) == (257, 24, 256)


def test_durations_of_a_schedule_may_be_given_in_any_unit():
    schedule = {"decay_type": "linear", "warmup_percent": 20, "end": 0.1}
    factor = small_setup(schedule=schedule).plan.schedule
    assert [float(factor(step)) for step in (0, 1, 2, 10)] == pytest.approx([0, 0.5, 1, 0.1])


@pytest.mark.slow
def test_missing_training_data_has_a_stand_in_for_compilation():
    words = ["input.data={'kind': 'folder', 'data_dir': '/nowhere'}", "num_classes=3", "input.pp="
             "decode|resize(8)|value_range(-1, 1)|onehot(3)", "pp_predict="]  # fmt: skip
    made = setup.load_setup("vit_digits", words, stand_in=True, devices=jax.devices()[:4])
    assert (made.model.mesh.size, made.task.example.shape, made.evaluators) == (4, (1, 8, 8, 3), {})
    with pytest.raises(InputError):
        setup.load_setup("vit_digits", words)


def test_activations_are_bfloat16_on_accelerators_where_the_config_leaves_it_open():
    spec = "vit_i1k"
    config = configs.load(spec, ["num_classes=10"])
    assert config.model.dtype_mm == "auto"
    assert kinds.make_model(config).dtype_mm == "float32"  # the tests run on CPUs
    capabilities = {"tpu": None, "gpu": "9.0", "gpu, AMD": "gfx942", "gpu, old": "7.5"}
    found = {
        name: kinds.make_model(config, SimpleNamespace(platform=name[:3], compute_capability=value)).dtype_mm
        for name, value in capabilities.items()
    }
    assert found == {"tpu": "bfloat16", "gpu": "bfloat16", "gpu, AMD": "bfloat16", "gpu, old": "float32"}
    chosen = configs.load(spec, ["num_classes=10", "model.dtype_mm=float32"])
    assert kinds.make_model(chosen, SimpleNamespace(platform="tpu")).dtype_mm == "float32"


def test_the_papers_language_models_are_recomputed_on_accelerators_only():
    config = configs.load("lm_pile:runlocal=true", [])
    found = {name: kinds.make_model(config, SimpleNamespace(platform=name)).remat for name in ("cpu", "gpu", "tpu")}
    assert found == {"cpu": "none", "gpu": "full_but_attention", "tpu": "full_but_attention"}
