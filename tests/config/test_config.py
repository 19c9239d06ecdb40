"""Loading, overriding and checking configs, and durations."""

import json
import re

import pytest
from ml_collections import ConfigDict

from dcvit.config import keys, values
from dcvit.config import load as configs
from dcvit.config.durations import Durations, check_schedule, durations_of
from dcvit.errors import ConfigError
from dcvit.hub.kinds import make_model
from dcvit.models import head_settings, lm, vit

FILE = """
from ml_collections import ConfigDict

def get_config(width: int = 8, rate: float = 0.1, name: str = "x", flag: bool = False):
    config = ConfigDict()
    config.total_epochs = 3
    config.model = {"width": width, "name": name, "flag": flag}
    config.lr = rate
    return config
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_arguments_take_the_types_of_their_defaults(file):
    for path in (file, file.with_suffix("")):
        config = configs.load(f"{path}:width=16,rate=1,name=S/16,flag=true")
        assert config.model.to_dict() == {"width": 16, "name": "S/16", "flag": True}
        assert isinstance(config.lr, float)


def test_overrides_reach_every_key_and_replace_durations(file):
    overrides = ["total_steps=7", "model.width=24", "model.rank=1", "seed=4", "ema_decay=0.5", "wd_mults=[('.*', 2.0)]"]
    config = configs.load(str(file), overrides)
    assert (config.total_steps, config.seed, config.ema_decay) == (7, 4, 0.5)
    assert "total_epochs" not in config
    assert config.model.to_dict() == {"width": 24, "name": "x", "flag": False, "rank": 1}
    assert list(config.wd_mults) == [(".*", 2.0)]
    assert configs.load("vit_digits", ["grad_clip_norm=none", "model.compose=none"]).grad_clip_norm is None
    with pytest.raises((AttributeError, KeyError)):
        config.new = 1


def test_a_star_in_place_of_an_evaluator_sets_a_key_of_all(file):
    evals = configs.load("vit_i1k", ["evals.*.optional=true", "evals.*.log_steps=7"]).evals
    assert len(evals) > 3
    assert all(evaluator.optional and evaluator.log_steps == 7 for evaluator in evals.values())
    assert not any("log_percent" in evaluator or "log_epochs" in evaluator for evaluator in evals.values())
    with pytest.raises(ConfigError, match=r"config\.evals has no evaluators"):
        configs.load(str(file), ["evals.*.optional=true"])


def test_configs_of_the_package_load_by_bare_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configs.load("vit_digits:attention=mha").model.compose is None
    assert configs.load("vit_digits").model.compose == "both"


@pytest.mark.parametrize("name", ["lightweight", "folded_post", "dcmha", "mha"])
def test_attention_names_settings_whose_fields_can_be_overridden(name):
    model = make_model(configs.load(f"lm_synthetic:attention={name}"))
    composition = model.composition()
    expected = head_settings.resolve(name, {}, {"num_heads": 4}, 4)
    assert composition.compose == expected["compose"]
    assert (composition.branches, composition.gate) == (expected.get("branches", "qk"), expected.get("gate", True))
    if name == "lightweight":
        assert make_model(configs.load(f"lm_synthetic:attention={name}", ["model.compose=pre"])).compose == "pre"


def test_what_a_run_writes_is_read_back_the_same(file, tmp_path):
    config = configs.load(str(file))
    (tmp_path / "config.json").write_text(config.to_json())
    again = values.read_json(tmp_path / "config.json")
    assert json.loads(again.to_json()) == json.loads(config.to_json())


@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        ("absent/vit_folder.py", [], "no config file absent/vit_folder.py; the package has 'vit_folder'"),
        ("lm_pile:branches=q", [], "no argument 'branches'; .* fields of the model as --config.model.branches=VALUE"),
        ("vit_digits", ["learning_rate=1"], "unknown key 'config.learning_rate'; did you mean 'lr'"),
        ("vit_digits", ["optimizer=adamw"], "did you mean 'optax_name'"),
        ("vit_digits", ["drop_path=0.1"], "did you mean 'model.stochastic_depth'"),
        ("vit_digits", ["model.drop_path_rate=0.1"], "did you mean 'model.stochastic_depth'"),
        ("vit_digits", ["early_stop=2"], r'early_stop=2 should be \("NAME/METRIC", "min" or "max", evaluations'),
        ("vit_digits:batch_size=8", [], "set it as --config.input.batch_size=VALUE"),
        ("vit_i1k:data=x", [], "no argument 'data'; did you mean 'data_dir'"),
        ("transfer:init=x,data=cifar10", [], "did you mean 'data_dir' or 'dataset'"),
        ("upcycle:init=x,compose=none", [], "did you mean 'attention'"),
        ("vit_digits", ["seed=-1"], r"config.seed=-1 should be in \[0, 2\*\*32\)"),
        ("vit_digits", ["wd_mults=[('(', 1.0)]"], "is not a regular expression"),
    ],
)
def test_a_bad_config_is_one_line(spec, overrides, message):
    with pytest.raises(ConfigError, match=message) as e:
        configs.load(spec, overrides)
    assert "\n" not in str(e.value)


def test_durations_in_every_unit():
    durations = Durations(batch_size=50, examples=1000, total_steps=400)
    for key, value, steps in [
        ("steps", 7, 7),
        ("epochs", 2, 40),
        ("epochs", 0.5, 10),
        ("examples", 1000, 20),
        ("percent", 2.5, 10),
    ]:
        assert durations.steps({f"x_{key}": value}, "x") == steps
    assert durations.steps({}, "x", default=3) == 3
    assert durations.steps({"x_percent": 1e-6}, "x") == 1
    assert durations.steps({"x_steps": 0}, "x") == 0
    assert durations.steps(ConfigDict({"x_steps": 4}), "x") == 4


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({"total_epochs": 5, "warmup_epochs": 9}, "config.schedule.warmup_epochs=9 is longer than config.total_epochs"),
        ({"total_epochs": 3, "warmup_percent": 101}, "config.schedule.warmup_percent=101 is longer than "),
        (
            {"total_steps": 9, "warmup_examples": 64, "cooldown_steps": 2},
            "config.schedule.warmup_examples=64 + config.schedule.cooldown_steps=2 is longer than config.total_steps=9",
        ),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_fit_is_refused_before_examples_are_counted(file, durations, message):
    words = ["total_epochs=none", "schedule={}", "input={'batch_size': 8}"]
    words += [f"{'' if key.startswith('total') else 'schedule.'}{key}={value}" for key, value in durations.items()]
    with pytest.raises(ConfigError) as error:
        check_schedule(configs.load(str(file), words))
    assert str(error.value).startswith(message)


def test_a_schedule_in_epochs_and_steps_is_compared_once_examples_are_counted(file):
    config = configs.load(str(file), ["total_epochs=2", "input={'batch_size': 8}", "schedule={'warmup_steps': 30}"])
    check_schedule(config)
    assert durations_of(config, 8 * 15).total_steps == 30
    with pytest.raises(ConfigError, match=r"warmup_steps=30 is longer than config\.total_epochs=2 \(30 of 28 steps\)"):
        durations_of(config, 8 * 14)


def test_durations_are_given_once_and_are_numbers():
    durations = Durations(batch_size=50, examples=1000)
    with pytest.raises(ConfigError, match=r"give exactly one.*`del config.x_steps` or `del config.x_epochs`"):
        durations.steps({"x_steps": 1, "x_epochs": 1}, "x")
    for bad in (-1, "3", float("nan"), 10**400):
        with pytest.raises(ConfigError, match="should be a number"):
            durations.steps({"x_steps": bad}, "x")
    with pytest.raises(ConfigError, match="percentage of itself"):
        durations.steps({"x_percent": 1}, "x")


def test_a_quoted_argument_of_a_config_may_contain_commas():
    found = configs.load("vit_folder:data_dir='/a,b=c',batch_size=3")
    assert (found.input.data.data_dir, found.input.batch_size) == ("/a,b=c", 3)
    assert configs.load("vit_folder:data_dir=/bob's,batch_size=3").input.data.data_dir == "/bob's"


def test_every_synonym_leads_to_a_key_that_exists():
    fields = {f"model.{name}" for name in (*vit.ViT.__dataclass_fields__, *lm.LM.__dataclass_fields__)}
    fields |= {f"schedule.warmup_{unit}" for unit in keys.UNITS} | {f"input.{name}" for name in keys.INPUT_KEYS}
    known = {*values.known_keys(), *fields}
    assert known >= set(keys.SYNONYMS.values())
    assert not keys.SYNONYMS.keys() & known


@pytest.mark.parametrize("name", [path.stem for path in configs.shipped()])
def test_help_of_a_config_has_its_command_arguments_and_keys(name):
    text = configs.describe(name)
    assert f"dcvit train --config {name}" in text
    arguments = text.partition("Arguments,")[2].partition("\n\n")[0].splitlines()[1:]
    assert arguments
    if name != "upcycle":  # its keys are those of another run
        assert "\n  input.batch_size = " in text
        assert re.search(r"\n  total_(steps|epochs) = [0-9]", text)


@pytest.mark.parametrize("given", [{"heads": "folded", "num_heads": 4}, {"compose": "post", "static": True, "rank": 1}])
def test_the_attention_of_a_config_replaces_that_of_the_model_that_it_starts_from(given):
    fields = {"width": 8, "depth": 1, "num_heads": 4}
    for name in head_settings.NAMES:
        found = vit.Model(3, **head_settings.with_attention({**fields, **given}, name))
        assert found == vit.Model(3, **fields, **head_settings.of_attention(name))
