"""Arms with several seeds: their runs at equal steps and equal time, paired differences, and the tables of them."""

import json
from pathlib import Path

import pytest
from fake_training import FakeTraining, set_times
from trained_workdirs import LM_TINY

from dcvit.config.load import load
from dcvit.config.values import read_json
from dcvit.errors import ConfigError, MetricsError
from dcvit.hub.kinds import make_model
from dcvit.models import head_settings
from dcvit.reproduction import ablations, arms, heads, seeded, speeds
from dcvit.reproduction.arms import Mean
from dcvit.reproduction.seeded import Run, train_all

ARMS = {"plain": {"compose": None}, "good": {"rank": 1}, "bad one": {"rank": 3}}
MS = {"plain": 10.0, "good": 12.5, "bad one": 5.0}
VALUES = {"plain": 3.0, "good": 2.0, "good=time": 2.4, "bad_one": 4.0, "bad_one=time": 3.5}


def fake(values=VALUES):
    """A stand-in for training, with a loss given by arm plus the seed."""

    def metrics(arm, config):
        value = values[arm.split("/")[1]]
        return {arms.METRIC: None if value is None else value + config.seed, heads.ACCURACY: 0.25 * (1 + config.seed)}

    return FakeTraining(metrics)


def group(folder, **changed):
    return arms.language_models(folder, {**ARMS, **changed})


def train_group(folder, seeds, train, **changed):
    return train_all(group(folder, **changed).plan(10), seeds, train)


def short(calls):
    return [(arm.split("/")[1], config.total_steps) for arm, _, config in calls]


@pytest.fixture
def measured(monkeypatch):
    """Times of steps without measuring them."""
    set_times(monkeypatch, MS.__getitem__)


@pytest.mark.usefixtures("measured")
def test_runs_at_equal_time_have_their_own_steps_and_the_schedule_over_them(tmp_path):
    train = fake()
    assert train_group(tmp_path, [0], train) == 0
    assert short(train.calls) == [("plain", 10), ("good", 10), ("good=time", 8), ("bad_one", 10), ("bad_one=time", 20)]
    for arm, steps in short(train.calls):
        config = read_json(tmp_path / arm / "seed0" / "config.json")
        assert config.total_steps == steps
        assert config.schedule.to_dict() == {"decay_type": "cosine", "warmup_percent": 5, "end": 0.1}


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_comparison_pairs_seeds_and_takes_equal_time_from_its_own_runs(tmp_path):
    train_group(tmp_path, [0, 1], fake())
    found = arms.compare(group(tmp_path), [0, 1], 10)
    assert {name: mean.mean for name, mean in found.at_steps.means.items()} == {
        "plain": 3.5, "good": 2.5, "bad one": 4.5,
    }  # fmt: skip
    assert found.at_steps.differences == {"plain": Mean(0, 0), "good": Mean(-1, 0), "bad one": Mean(1, 0)}
    assert found.steps == {"plain": 10, "good": 8, "bad one": 20}
    assert [mean.mean for mean in found.at_time.means.values()] == [3.5, pytest.approx(2.9), 4.0]
    assert found.at_time.means["good"].interval == pytest.approx(6.353, rel=1e-3)
    assert found.times == (MS, "a machine")
    paper = {name: ablations.Arm({}, value) for name, value in zip(ARMS, (12.0, 11.0, 11.0), strict=True)}
    assert ablations.ordered_pairs(paper, found) == (1, 2)
    assert arms.Claim("", "good", "plain").verdict(found) == "holds (-1.0000 ± 0.0000)"
    assert arms.Claim("", "plain", "good").verdict(found).startswith("does not hold")


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (Mean(-3.0, 2.0), "gain"),
        (Mean(3.0, 2.0), "loss"),
        (Mean(-3.0, 3.0), "not shown"),
        (Mean(-0.9, 0.1), "not shown"),  # too small to count
        (Mean(-9.0, None), "not shown"),  # one seed
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_zero_and_a_large_difference(difference, expected):
    assert arms.verdict(difference, lower=True, least=1) == expected
    opposite = {"gain": "loss", "loss": "gain"}.get(expected, expected)
    assert arms.verdict(difference, lower=False, least=1) == opposite


@pytest.mark.usefixtures("measured")
def test_training_skips_complete_runs_and_stops_at_a_failed_one(tmp_path):
    train = fake()
    train.statuses = {3: 75}
    assert train_group(tmp_path, [0], train) == 75
    assert len(train.calls) == 3
    with pytest.raises(ConfigError, match="the runs of seed 0 are not complete"):
        arms.compare(group(tmp_path), [0], 10)
    assert train_group(tmp_path, [0], train) == 0
    assert [arm for arm, _ in short(train.calls[3:])] == ["good=time", "bad_one", "bad_one=time"]
    assert train_group(tmp_path, [0], train) == 0
    assert len(train.calls) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("fields", [{"rank": 1, "branches": "q"}, {}])
def test_runs_of_another_config_are_neither_skipped_nor_mixed_in(fields, tmp_path):
    train = fake()
    train_group(tmp_path, [0], train)
    with pytest.raises(ConfigError, match=r"good/seed0 holds a run of another config: config\.model"):
        train_group(tmp_path, [0], train, good=fields)
    assert len(train.calls) == 5
    run = group(tmp_path).at_equal_steps(10)["good"]
    other = run._replace(overrides={**run.overrides, "model.rank": 4})
    assert train_all([other], [1], train) == 0
    with pytest.raises(ConfigError, match=r"good/seed1 holds a run of another config: .*rank \(saved: 4, now: 1\)"):
        seeded.all_finals({"good": run}, [0, 1])


@pytest.mark.usefixtures("measured")
def test_a_run_that_diverged_is_an_error_and_not_left_out(tmp_path):
    with pytest.raises(MetricsError, match=r"good/seed0: validation/bits_per_byte is not a number after the last step"):
        train_group(tmp_path, [0], fake({**VALUES, "good": None}))


@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_step_times_are_measured_once_and_only_for_these_configs(tmp_path, monkeypatch):
    def all_configs(**fields):
        """Two plain models, which compile fastest."""
        fields = {**LM_TINY, "model.compose": None, **fields}
        return {
            arm: Run(tmp_path / arm, "lm_stdlib:steps=1", {**fields, "model.mlp_dim": width}, arms.METRIC)
            for arm, width in (("a", 16), ("b", 24))
        }

    monkeypatch.setattr(speeds, "ROUNDS", 2)
    found = speeds.step_times(all_configs(), tmp_path / "runs")
    assert all(0 < ms < 60_000 for ms in found.ms.values())
    monkeypatch.setattr(speeds, "interleaved", lambda *_: pytest.fail("measured again"))
    assert speeds.step_times(all_configs(), tmp_path / "runs") == found
    with pytest.raises(ConfigError, match="was computed from other configs"):
        speeds.step_times(all_configs(lr=0.5), tmp_path / "runs")
    (tmp_path / "runs" / speeds.NAME).write_text('{"ms": {"a": 1')
    with pytest.raises(ConfigError, match=r"cannot read .*; remove it to compute it again"):
        speeds.step_times(all_configs(), tmp_path / "runs")


def test_every_claim_compares_arms_in_the_order_of_the_paper():
    for claim in ablations.CLAIMS:
        assert ablations.ARMS[claim.better].paper < ablations.ARMS[claim.worse].paper, claim.text


@pytest.mark.slow
def test_table_8_has_paired_differences_beside_the_paper(tmp_path, monkeypatch):
    """A DCViT takes 1.6 times the time of a ViT, and accuracy grows by 0.02 a seed."""
    set_times(monkeypatch, {"ViT": 10.0, "DCViT": 16.0}.__getitem__)
    top1 = {"digits/ViT": 0.5, "digits/DCViT": 0.6, "digits/DCViT=time": 0.45}
    top1 |= {"scenes/ViT": 0.2, "scenes/DCViT": 0.3, "scenes/DCViT=time": 0.2}
    train = FakeTraining(lambda arm, config: {ablations.IMAGE_METRIC: top1[arm] + 0.02 * config.seed})
    train_all(ablations.plan8(tmp_path, 80), [0, 1], train)
    table = ablations.table8(tmp_path, [0, 1], 80)
    rows = {row["model"]: row for row in table.rows}
    assert len(rows) == 6
    plain, composed = rows["ViT on digits"], rows["DCViT on digits"]
    assert plain["top-1 %"] == pytest.approx(51)
    assert plain["± 95 %"] == pytest.approx(12.706, rel=1e-3)  # t of one degree of freedom
    assert composed["difference"] == pytest.approx(10)
    assert composed["difference ± 95 %"] == pytest.approx(0, abs=1e-9)
    assert (plain["ImageNet-1k, 300 epochs, paper"], composed["ImageNet-1k, 300 epochs, paper"]) == (79.8, 80.1)
    assert rows["DCViT on digits, equal time"]["steps"] == 50
    assert rows["DCViT on digits, equal time"]["difference"] == pytest.approx(-5)
    assert "more accurate than ViT on digits at equal steps: holds (+10.00" in table.notes[1]
    assert "more accurate than ViT on digits at equal time: does not hold (-5.00" in table.notes[1]
    assert "more accurate than ViT on scenes at equal time: undecided" in table.notes[1]


def test_the_leaderboard_has_all_names_and_the_words_of_a_run_set_them():
    assert {*heads.ARMS, *heads.ELSEWHERE} == {*head_settings.NAMES, "dcmha, rank 1"}
    assert (heads.model_of("dcmha").rank, heads.model_of("dcmha, rank 1").rank) == (2, 1)
    text, tasks = arms.language_models(Path(), heads.ARMS).at_equal_steps(7), heads.task_runs(Path(), 7)
    for name in heads.ARMS:
        expected = heads.model_of(name)
        for run, steps, fields in (
            (text[name], 7, ("compose", "groups", "static", "rank")),
            (tasks[name], 23, ("compose", "branches", "static", "rank")),
        ):
            config = load(run.spec, run.words(3))
            assert (config.total_steps, config.seed) == (steps, 3)
            assert [getattr(make_model(config), f) for f in fields] == [getattr(expected, f) for f in fields], name
    flash = {name for name in heads.ARMS if heads.is_flash(heads.model_of(name))}
    assert flash == {"mha", "gated", "folded"}


@pytest.mark.slow
def test_the_leaderboard_trains_on_generated_tasks_and_has_their_accuracy_over_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "ARMS", {name: heads.ARMS[name] for name in ("mha", "dcmha")})
    set_times(monkeypatch, lambda name: 1.0)
    folders = ("mha", "dcmha", "mha=synthetic", "dcmha=synthetic")
    train = fake(dict.fromkeys(folders, 2.0))
    assert train_all(heads.plan(tmp_path, 60), [0, 1], train) == 0
    assert {*short(train.calls)} == {*zip(folders, (60, 60, 200, 200), strict=True)}
    for row in heads.table(tmp_path, [0, 1], 60).rows:
        assert row["accuracy on tasks %"] == 37.5
        assert row["accuracy on tasks ± 95 %"] == pytest.approx(12.706 * 12.5, rel=1e-3)  # t of one degree of freedom


def test_estimates_of_heads_are_those_of_the_file(tmp_path):
    assert heads.tpu_seconds(tmp_path / "none.json") == {}
    estimates = [
        {"config": f"lm_pile:preset=A model.heads={name}", "seconds": s}
        for name, s in (("mha", 1), ("dcmha model.rank=1", 2))
    ]
    (tmp_path / "a.json").write_text(json.dumps([*estimates, {"config": "vit_i1k", "seconds": 3}]))
    assert heads.tpu_seconds(tmp_path / "a.json") == {"mha": 1, "dcmha, rank 1": 2}


GAIN = {"plain": 0.0, "DCFlash": 0.2, "query-wise": 0.2, "complete": 0.3}


def key_head_arms():
    return [(n, name) for n in heads.KEY_HEADS for name in heads.fields_of(n)]


@pytest.mark.parametrize(("n", "name"), key_head_arms())
def test_arms_have_the_composition_that_they_are_named_for(n, name):
    model = arms.language_model({**arms.MODEL, **heads.fields_of(n)[name]})
    assert (model.num_heads, model.num_key_heads) == (8, n)
    folds = name != "plain" and model.branches == "q" and model.groups % n == 0
    assert folds == (name == "DCFlash" or (name, n) == ("query-wise", 1))
    if n == heads.IMAGE_KEY_HEADS:
        run = heads.key_head_vits(Path()).at_equal_steps(1500)[name]
        vit = make_model(load(run.spec, run.words(0)))
        fields = ("num_heads", "num_key_heads", "compose", "branches", "groups")
        assert [getattr(vit, field) for field in fields] == [getattr(model, field) for field in fields]


@pytest.mark.exhaustive
def test_rows_are_compared_with_the_plain_model_of_as_many_key_heads(tmp_path, monkeypatch):
    set_times(monkeypatch, lambda name: 10.0 if name.endswith("plain") else 20.0)

    def metrics(arm, config):
        kind = arm.split("/")[1].split("_", 1)[-1]  # without "K=2_" of language models
        gain = GAIN[kind.removesuffix("=time")] / (2 if kind.endswith("=time") else 1)
        value = 0.5 + gain if config.model_name == "vit" else 3 - gain * config.model.num_key_heads
        return {heads.IMAGE_METRIC: value + 0.01 * config.seed, arms.METRIC: value + 0.01 * config.seed}

    assert train_all(heads.key_heads_plan(tmp_path, 40), [0, 1], FakeTraining(metrics)) == 0
    table = heads.key_heads_table(tmp_path, [0, 1], 40)
    assert [row["config"] for row in table.rows] == [f"K={n} {name}" for n, name in key_head_arms()]
    for row, (n, name) in zip(table.rows, key_head_arms(), strict=True):
        assert row["difference"] == pytest.approx(-GAIN[name] * n)
        assert row["at equal time"] == pytest.approx(3.005 - GAIN[name] * n / (1 if name == "plain" else 2))
        assert row["steps at equal time"] == (40 if name == "plain" else 20)
        cache = 2 * n * 8 * 2 + (160 if name == "complete" else 0)  # keys and values, and key-wise weights, two layers
        assert row["cache per token"] == cache
        assert row["ViT difference"] == (pytest.approx(100 * GAIN[name]) if n == heads.IMAGE_KEY_HEADS else None)
    statements = table.notes[-1]
    assert "with 2 of 8 key heads, composition inside key heads improves plain attention: holds (-0.4000" in statements
    assert statements.count("\n- ") == 9
