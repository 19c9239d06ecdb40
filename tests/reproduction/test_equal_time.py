"""Forms of composition at equal time: they differ in the model alone, and are compared with the best plain form."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from fake_training import FakeTraining, set_times

from dcvit.config.load import load
from dcvit.hub.kinds import make_model
from dcvit.reproduction import equal_time
from dcvit.reproduction.arms import METRIC
from dcvit.reproduction.equal_time import FORMS, GROUPED, TASKS, Stage
from dcvit.reproduction.seeded import train_all

TOKENS, SCENE = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 27, 27, 1))
FOLDED = "folded, K=2, R=1, both"
STAGES = [found for found in vars(equal_time).values() if isinstance(found, Stage)]
MS = {"mha": 10.0, GROUPED: 8.0, FOLDED: 10.0, "talking": 20.0}
LOSS = {"mha": 2.0, "grouped_K=2": 1.9, "folded_K=2_R=1_both": 1.8, "talking": 1.95}


@pytest.fixture
def stage(monkeypatch):
    set_times(monkeypatch, MS.get)
    return Stage("few", "Few forms", {name: FORMS[name] for name in MS}, 40)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_forms_are_models_of_equal_heads_that_fold_or_say_that_they_do_not(stage, monkeypatch, tmp_path):
    set_times(monkeypatch, lambda name: 10.0)
    assert next(iter(stage.forms)) == "mha"
    heads = set()
    for name, run in zip(stage.forms, dataclasses.replace(stage, limit=2).plan(tmp_path, 40), strict=True):
        config = load(run.spec, [*run.words(0), "num_classes=2"])
        model = make_model(config)
        heads.add((model.num_heads, model.width // model.num_heads))
        composition = model.composition()
        assert (composition.compose is None) == name.startswith(("mha", "grouped"))
        assert ("layer" in name or "every" in name or "two" in name) == (model.compose_layers is not None)
        if name.startswith("folded"):
            assert composition.foldable(model.num_key_heads), name
    assert len(heads) == 1


@pytest.mark.parametrize(
    ("spec", "forms", "inputs"),
    [("lm_synthetic", equal_time.CONFIRMED, TOKENS), (equal_time.SCENES.spec, equal_time.ON_SCENES, SCENE)],
)
def test_the_wider_plain_form_has_the_most_parameters(spec, forms, inputs):
    def parameters(fields):
        model = make_model(load(spec, [f"model.{key}={value}" for key, value in fields.items()]))
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), inputs)))

    counts = {name: parameters(fields) for name, fields in forms.items()}
    assert max(counts, key=counts.get) == equal_time.WIDER
    if forms is equal_time.CONFIRMED:
        assert counts["lightweight"] - counts["mha"] == 77_632 - 76_480  # as in docs/reproduction/tasks.md


def test_runs_take_the_time_of_the_first_form_and_differ_in_the_model_and_the_rate_of_compositions(stage, tmp_path):
    runs = stage.plan(tmp_path, 40)
    assert len({run.folder for run in runs}) == len(runs) == 4
    configs = [load(run.spec, run.words(3)).to_dict() for run in runs]
    assert [config.pop("total_steps") for config in configs] == [40, 50, 40, 20]
    slow = ((equal_time.COMPOSITIONS, 0.1),)
    assert [config.pop("lr_mults") for config in configs] == [(), (), slow, slow]
    assert {(config["seed"], config["optax_name"]) for config in configs} == {(3, "muon")}
    for config in configs:
        del config["model"]
        assert config == configs[0]


def test_a_gain_is_to_the_best_plain_form_and_not_to_the_first(stage, tmp_path):
    def metrics(arm, config):
        form = arm.split("/")[-1].removesuffix("=time")
        return {"validation/bits_per_byte": LOSS[form] + 0.01 * config.seed}

    assert train_all(stage.plan(tmp_path, 40), [0, 1], FakeTraining(metrics)) == 0
    table = stage.table(tmp_path, [0, 1], 40)
    rows = {row["form"]: row for row in table.rows}
    best, folded, talking = (rows[form] for form in (GROUPED, FOLDED, "talking"))
    assert (best["difference"], best["verdict"], best["steps"]) == (0, "–", 50)
    assert (folded["difference"], folded["verdict"]) == (pytest.approx(-0.1), "gain")
    assert (talking["difference"], talking["verdict"]) == (pytest.approx(0.05), "loss")
    assert (talking["step ÷ mha"], talking["steps"]) == (2, 20)
    assert folded["bits per byte"] == pytest.approx(1.805)
    assert "Muon with the rate 0.003, times 0.1 for compositions." in table.notes[0]


def test_a_form_may_have_a_rate_of_its_own(stage, tmp_path):
    stage = dataclasses.replace(stage, own_lr={GROUPED: 0.5})
    runs = stage.plan(tmp_path, 40)
    assert [load(run.spec, run.words(0)).lr for run in runs] == [0.003, 0.5, 0.003, 0.003]
    assert train_all(runs, [0, 1], FakeTraining(lambda arm, config: {METRIC: 1.0 + config.seed})) == 0
    assert "rate 0.003, times 0.1 for compositions, 0.5 for grouped, K=2." in stage.table(tmp_path, [0, 1], 40).notes[0]


def test_forms_that_cost_too_much_are_timed_and_not_trained(stage, tmp_path):
    cheap = dataclasses.replace(stage, limit=1.5)
    runs = cheap.plan(tmp_path, 40)
    assert not any("talking" in str(run.folder) for run in runs)
    assert train_all(runs, [0, 1], FakeTraining(lambda arm, config: {METRIC: 1.0 + config.seed})) == 0
    table = cheap.table(tmp_path, [0, 1], 40)
    assert not any(row["form"].startswith("talking") for row in table.rows)
    assert "talking: 2.00" in table.notes[1]


def test_more_answers_are_better_and_compositions_have_the_full_rate(monkeypatch, tmp_path):
    set_times(monkeypatch, lambda name: 10.0)
    accuracy = {"mha": 0.5, "grouped_K=2": 0.6, "dcmha": 0.9, "lightweight": 0.3}
    stage = dataclasses.replace(
        TASKS, forms={name: TASKS.forms[name] for name in ("mha", GROUPED, "dcmha", "lightweight")}
    )
    runs = stage.plan(tmp_path, 40)
    for run in runs:
        config = load(run.spec, run.words(1))
        assert not config.get("lr_mults")
        assert config.seed == 201
    metrics = lambda arm, config: {equal_time.ANSWERS.metric: accuracy[arm.split("/")[-1]] + 0.01 * config.seed}  # noqa: E731
    assert train_all(runs, [0, 1], FakeTraining(metrics)) == 0
    rows = stage.table(tmp_path, [0, 1], 40).rows
    assert [row["form"] for row in rows] == ["dcmha", GROUPED, "mha", "lightweight"]
    assert [row["verdict"] for row in rows] == ["gain", "–", "–", "loss"]
    assert rows[0]["difference"] == pytest.approx(30)
