"""The command reproduce: formulas of tables, runs of a few steps, results, and commands that load."""

import csv
import functools
import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from training_runs import LM_TINY

from dcvit import cli, reproduce
from dcvit.config.load import load, read_json
from dcvit.errors import ConfigError, MetricsError
from dcvit.models import head_settings, lm
from dcvit.reproduction import arms, catalog, full, heads, seeded, step_times, table2, table6, table9, table10, tables
from dcvit.training.model import make_model


def test_every_table_and_figure_of_the_paper_is_listed(capsys):
    numbered = {f"table{n}" for n in range(1, 12)} | {f"figure{n}" for n in range(1, 9)}
    assert set(catalog.ENTRIES) == numbered | {"heads", "key_heads"}
    assert cli.run(reproduce.main, ["--list"]) == 0
    assert "table9" in capsys.readouterr().out


def test_entries_say_what_can_be_computed():
    for name, entry in catalog.ENTRIES.items():
        computed = name in {*catalog.STATIC, *catalog.TRAINED}
        assert computed == (entry.desk != catalog.NOTHING), name
        assert (name in full.RUNS) == (entry.full == catalog.COMMANDS), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table99"], "unknown table or figure 'table99'"),
        (["table1"], "table1 at scale desk: nothing to compute; see --list"),
        (["table2", "--scale", "full"], "table2 at scale full: nothing to compute; see --list"),
        (["table9", "--steps", "0"], "--steps 0: expected 1 or more"),
        ([], "give the name of a table or figure, or --list"),
    ],
    ids=str,
)
def test_errors_are_one_line(words, message, capsys, tmp_path):
    assert cli.run(reproduce.main, [*words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "length", "params", "flops"), table2.CASES)
def test_formulas_of_table_2_round_to_the_paper(size, length, params, flops):
    net = table2.one_layer(size, False, 1)
    head_dim, rho = net.width // net.num_heads, length / net.width
    assert round(100 * table2.extra_parameters(head_dim), 1) == params
    assert round(100 * table2.extra_operations(head_dim, rho), 1) == pytest.approx(flops, abs=0.051)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.exhaustive) for case in table2.CASES[:-1]), table2.CASES[-1]]
)
def test_table_2_counts_models_of_the_paper(case, monkeypatch):
    """By hand: 4·(M·2RH + (2RH)² + M·H) parameters, and the operations of Appendix E for all pairs."""
    monkeypatch.setattr(table2, "CASES", (case,))
    (row,) = table2.table().rows
    size, length, *_ = case
    assert (row["model"], row["S"]) == (size, length)
    net = table2.one_layer(size, True, 1)
    width, heads_, rank = net.width, net.num_heads, net.rank
    extra = 4 * (width * 2 * rank * heads_ + (2 * rank * heads_) ** 2 + width * heads_)
    plain = 12 * width**2
    assert row["params, counted %"] == pytest.approx(100 * extra / plain, rel=2e-3)  # biases and norms
    per_pair = 4 * heads_ * (2 * rank + 1)
    expected = (length * extra + length**2 * per_pair) / (length * plain + length**2 * 2 * width)
    assert row["FLOPs, all pairs %"] == pytest.approx(100 * expected, rel=1e-6)
    # The program also has element-wise operations, and zeros of a block matrix.
    assert row["FLOPs, all pairs %"] < row["FLOPs, program %"] < 1.25 * row["FLOPs, all pairs %"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [size if size == "6.9B" else pytest.param(size, marks=pytest.mark.exhaustive) for size in table6.PAPER]
)
def test_bounds_of_table_6_are_above_the_speed_of_the_paper(size, monkeypatch):
    monkeypatch.setattr(table6, "PAPER", {size: table6.PAPER[size]})
    (bound,) = (row for row in table6.bounds() if row["case"] == f"{size} training, FLOPs bound, same windows")
    assert bound["speed %"] > table6.PAPER[size][0]


@pytest.mark.exhaustive
def test_table_10_has_bounds_in_the_order_of_the_windows():
    rows = {row["local:global"]: row for row in table10.table().rows}
    counted = [rows[name]["TFM++ FLOPs / FLOPs %"] for name in ("1:1", "3:1", "7:1")]
    assert counted == sorted(counted)
    # Half of the layers, a quarter and an eighth are global; a token of a full context has 2048 or 256 slots.
    for name, part in (("1:1 QW", 1 / 2), ("3:1 QW", 1 / 4)):
        assert rows[name]["cache / TFM++ cache %"] == pytest.approx(100 * (part + (1 - part) * 256 / 2048))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", full.RUNS)
def test_commands_of_full_runs_load_and_hours_follow_from_the_formula(name):
    rows = full.table(name).rows
    assert (
        len({row["command"] for row in rows}) == len(rows) == len({re.search("RUNS/.*", r["command"])[0] for r in rows})
    )
    for row in rows:
        words = shlex.split(row["command"].strip("`"))
        assert words[:3] == ["dcvit", "train", "--config"]
        config = load(words[3].replace("DATA", "/data/pile"), [w.removeprefix("--config.") for w in words[6:]])
        make_model(config)
        seconds = row["steps"] * row["PFLOP per step"] * 1e15 / (full.UTILIZATION * row["chips"])
        peak = {"v5e": 197e12, "v5p": 459e12, "v6e": 918e12}[row["slice"].partition(":")[0]]
        assert row["hours"] == pytest.approx(seconds / peak / 3600)
        assert row["chip hours"] == pytest.approx(row["hours"] * row["chips"])


def test_ablations_are_the_full_runs_with_other_sizes():
    """Desk and full arms of Table 9 have the same names and the same composition."""
    fields = ("compose", "branches", "projection", "gate", "static", "rank", "groups")
    assert set(table9.ARMS) == set(full.RUNS["table9"])
    for name, (spec, _) in full.RUNS["table9"].items():
        big = make_model(load(f"{spec},data=x"))
        desk = {key: None if value == "None" else value for key, value in table9.ARMS[name].fields.items()}
        small = lm.Model(257, **{**arms.MODEL, **desk})
        if big.compose is None:
            assert small.compose is None
        else:
            assert [getattr(big, f) for f in fields] == [getattr(small, f) for f in fields], name


def test_every_claim_compares_arms_in_the_order_of_the_paper():
    for claim in table9.CLAIMS:
        assert table9.ARMS[claim.better].paper < table9.ARMS[claim.worse].paper, claim.text


def test_the_leaderboard_has_all_names_and_the_words_of_a_run_set_them():
    assert tuple(heads.ARMS) == head_settings.NAMES
    for name, arm in heads.ARMS.items():
        config = load(arms.spec_of(7), arms.words_of(arm, 3))
        assert (config.total_steps, config.seed) == (7, 3)
        net, expected = make_model(config), heads.model_of(arm)
        assert [getattr(net, f) for f in ("heads", "compose", "groups", "static")] == [
            getattr(expected, f) for f in ("heads", "compose", "groups", "static")
        ], name
        config = load("lm_synthetic:steps=7", heads.task_words(name, 3))
        assert (config.total_steps, config.seed) == (7, 3)
        net = make_model(config)
        assert [getattr(net, f) for f in ("heads", "compose", "branches", "static")] == [
            getattr(expected, f) for f in ("heads", "compose", "branches", "static")
        ], name
    flash = {name for name, arm in heads.ARMS.items() if heads.is_flash(heads.model_of(arm))}
    assert flash == {"mha", "gated", "folded", "moh", "moh_topk", "diff2"}


ARMS = {
    "plain": arms.Arm({"compose": "None"}, 12.0),
    "good": arms.Arm({"rank": 1}, 11.0),
    "bad one": arms.Arm({"rank": 3}, 11.0),
}
MS = {"plain": 10.0, "good": 12.5, "bad one": 5.0}


class FakeTraining:
    """Stands in for the command `dcvit train`: writes the files of a run whose metric is given by folder and seed."""

    def __init__(self, values):
        self.values, self.calls, self.statuses = values, [], {}

    def __call__(self, words):
        workdir = Path(words[3])
        config = load(words[1], [word.removeprefix("--config.") for word in words[4:]])
        self.calls.append((workdir.parent.name, workdir.name, config.total_steps))
        if status := self.statuses.pop(len(self.calls), 0):
            return status
        workdir.mkdir(parents=True, exist_ok=True)
        record = json.loads(config.to_json())
        record["model"]["context"] = arms.CONTEXT  # as the data sets it
        (workdir / "config.json").write_text(json.dumps(record))
        value = self.values[workdir.parent.name]
        last = {"step": config.total_steps, arms.METRIC: None if value is None else value + config.seed}
        last[heads.ACCURACY] = 0.25 * (1 + config.seed)
        rows = [{"step": 0, "num_params": 5, arms.METRIC: 8.0}, last]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0


VALUES = {"plain": 3.0, "good": 2.0, "good=time": 2.4, "bad_one": 4.0, "bad_one=time": 3.5}


@pytest.fixture
def measured(monkeypatch):
    """Times of steps without measuring them."""
    times = step_times.StepTimes(MS, "a machine")
    monkeypatch.setattr(arms.step_times, "step_times", lambda configs, folder: times)


def test_estimates_of_heads_are_those_of_the_file(tmp_path):
    assert heads.tpu_seconds(tmp_path / "none.json") == {}
    estimates = [
        {"config": f"lm_pile:preset=A model.heads={name}", "seconds": s} for name, s in (("mha", 1), ("moh_topk", 2))
    ]
    (tmp_path / "a.json").write_text(json.dumps([*estimates, {"config": "vit_i1k", "seconds": 3}]))
    assert heads.tpu_seconds(tmp_path / "a.json") == {"mha": 1, "moh_topk": 2}


def test_differences_of_zero_have_neither_sign_nor_digits_of_rounding():
    assert [tables.shown(x) for x in (-4e-16, 1.5e-7, -0.25)] == ["0", "1.5e-07", "-0.25"]
    assert arms.decision(-1e-17, 0.5) == "undecided (+0.0000 ± 0.5000)"


@pytest.mark.usefixtures("measured")
def test_runs_at_equal_time_have_their_own_steps_and_the_schedule_over_them(tmp_path):
    train = FakeTraining(VALUES)
    assert arms.train_arms(ARMS, tmp_path, [0], train, 10) == 0
    expected = [("plain", 10), ("good", 10), ("good=time", 8), ("bad_one", 10), ("bad_one=time", 20)]
    assert [(arm, steps) for arm, _, steps in train.calls] == expected
    for arm, _, steps in train.calls:
        config = read_json(tmp_path / arm / "seed0" / "config.json")
        assert config.total_steps == steps
        assert config.schedule.to_dict() == {"decay_type": "cosine", "warmup_percent": 5, "end": 0.1}


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_comparison_pairs_seeds_and_takes_equal_time_from_its_own_runs(tmp_path):
    arms.train_arms(ARMS, tmp_path, [0, 1], FakeTraining(VALUES), 10)
    found = arms.compare(ARMS, tmp_path, [0, 1], 10)
    assert found.means == {"plain": 3.5, "good": 2.5, "bad one": 4.5}
    assert found.differences == {"plain": 0, "good": -1, "bad one": 1}
    assert found.difference_intervals["good"] == 0
    assert found.equal_steps == {"plain": 10, "good": 8, "bad one": 20}
    assert found.equal_time == {"plain": 3.5, "good": pytest.approx(2.9), "bad one": 4.0}
    assert found.equal_time_intervals["good"] == pytest.approx(6.353, rel=1e-3)
    assert (found.step_ms, found.machine) == (MS, "a machine")
    assert arms.ordered_pairs(ARMS, found) == (1, 2)
    assert arms.verdict(arms.Claim("", "good", "plain"), found) == "holds (-1.0000 ± 0.0000)"
    assert arms.verdict(arms.Claim("", "plain", "good"), found).startswith("does not hold")


@pytest.mark.slow
def test_the_leaderboard_trains_on_generated_tasks_and_has_their_accuracy_over_seeds(tmp_path, monkeypatch):
    few = {name: heads.ARMS[name] for name in ("mha", "dcmha")}
    times = step_times.StepTimes(dict.fromkeys(few, 1.0), "a machine")
    monkeypatch.setattr(arms.step_times, "step_times", lambda configs, folder: times)
    monkeypatch.setattr(heads, "ARMS", few)
    folders = ("mha", "dcmha", "mha=synthetic", "dcmha=synthetic")
    train = FakeTraining(dict.fromkeys(folders, 2.0))
    assert heads.train(tmp_path, [0, 1], train, 60) == 0
    assert {(folder, steps) for folder, _, steps in train.calls} == set(zip(folders, (60, 60, 200, 200), strict=True))
    for row in heads.table(tmp_path, [0, 1], 60).rows:
        assert row["accuracy on tasks %"] == 37.5
        assert row["accuracy on tasks ± 95 %"] == pytest.approx(12.706 * 12.5, rel=1e-3)  # t of one degree of freedom


@pytest.mark.usefixtures("measured")
def test_training_skips_complete_runs_and_stops_at_a_failed_one(tmp_path):
    train = FakeTraining(VALUES)
    train.statuses = {3: 75}
    assert arms.train_arms(ARMS, tmp_path, [0], train, 10) == 75
    assert len(train.calls) == 3
    with pytest.raises(ConfigError, match="the runs of seed 0 are not complete"):
        arms.compare(ARMS, tmp_path, [0], 10)
    assert arms.train_arms(ARMS, tmp_path, [0], train, 10) == 0
    assert [arm for arm, *_ in train.calls[3:]] == ["good=time", "bad_one", "bad_one=time"]
    assert arms.train_arms(ARMS, tmp_path, [0], train, 10) == 0
    assert len(train.calls) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("arm", [arms.Arm({"rank": 1, "branches": "q"}), arms.Arm({})])
def test_runs_of_another_config_are_neither_skipped_nor_mixed_in(arm, tmp_path):
    train = FakeTraining(VALUES)
    arms.train_arms(ARMS, tmp_path, [0], train, 10)
    with pytest.raises(ConfigError, match=r"good/seed0 holds a run of another config: config\.model"):
        arms.train_arms({**ARMS, "good": arm}, tmp_path, [0], train, 10)
    assert len(train.calls) == 5
    path = tmp_path / "good" / "seed1"
    path.mkdir()
    words = ["--config", arms.spec_of(10), "--workdir", str(path)]
    train([*words, "--config.seed=1", "--config.model.rank=4"])
    with pytest.raises(ConfigError, match=r"good/seed1 holds a run of another config: .*rank \(saved: 4, now: 1\)"):
        seeded.finals({"good": tmp_path / "good"}, [0, 1], arms.METRIC)


@pytest.mark.usefixtures("measured")
def test_evaluation_on_other_data_is_another_config(tmp_path):
    train = FakeTraining(VALUES)
    arms.train_arms(ARMS, tmp_path, [0], train, 10)
    words = [*arms.words_of(ARMS["plain"], 0), "evals.validation.data.limit=7"]
    with pytest.raises(ConfigError, match=r"config\.evals\.validation\.data\.limit"):
        seeded.check_config(tmp_path / "plain" / "seed0", load(arms.spec_of(10), words))


@pytest.mark.usefixtures("measured")
def test_a_run_that_diverged_is_an_error_and_not_left_out(tmp_path):
    with pytest.raises(MetricsError, match=r"good/seed0: validation/bits_per_byte is not a number after the last step"):
        arms.train_arms(ARMS, tmp_path, [0], FakeTraining({**VALUES, "good": None}), 10)


def test_steps_are_timed_in_turn_and_the_first_of_each_turn_is_not_timed(monkeypatch):
    order, clock = [], itertools.count()
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: float(next(clock)))
    steps = {name: functools.partial(order.append, name) for name in ("a", "b")}
    assert step_times.interleaved(steps, 3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert order == ["a", "a", "b", "b"] * 3


@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_step_times_are_measured_once_and_only_for_these_configs(tmp_path, monkeypatch):
    def all_configs(**fields):
        """Two plain models, which compile fastest."""
        words = [f"{key}={value}" for key, value in {**LM_TINY, "model.compose": None, **fields}.items()]
        return {arm: (arms.spec_of(1), [*words, f"model.mlp_dim={width}"]) for arm, width in (("a", 16), ("b", 24))}

    monkeypatch.setattr(step_times, "ROUNDS", 2)
    found = step_times.step_times(all_configs(), tmp_path / "runs")
    assert all(0 < ms < 60_000 for ms in found.ms.values())
    monkeypatch.setattr(step_times, "interleaved", lambda *_: pytest.fail("measured again"))
    assert step_times.step_times(all_configs(), tmp_path / "runs") == found
    with pytest.raises(ConfigError, match="was computed from other configs"):
        step_times.step_times(all_configs(seed=1), tmp_path / "runs")
    (tmp_path / "runs" / step_times.NAME).write_text('{"ms": {"a": 1')
    with pytest.raises(ConfigError, match=r"cannot read .*; remove it to compute it again"):
        step_times.step_times(all_configs(), tmp_path / "runs")


def test_results_are_written_with_the_values_of_the_paper(tmp_path):
    rows = [{"config": "a", "ours": 1.23456, "paper": 2}, {"config": "b", "ours": 12345.6, "paper": None}]
    table = tables.Table("t", "Title", rows, ("A note.",), tables.Chart("config", "ours", None, "paper"))
    md, plain, png = tables.write(table, tmp_path / "new")
    assert md.read_text() == (
        "# Title\n\n| config | ours | paper |\n| --- | --- | --- |\n| a | 1.235 | 2 |\n| b | 12,346 | – |\n\n"
        "![Title](t.png)\n\nA note.\n"
    )
    assert list(csv.reader(plain.read_text().splitlines()))[1] == ["a", "1.23456", "2"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_notes_are_wrapped_without_a_change_of_their_words():
    note = "Settings: " + "a word " * 40 + "\n\n- one\n- two " + "more " * 40 + "\n- " + "x" * 200
    lines = tables.wrapped(note).splitlines()
    assert " ".join(lines).split() == note.split()
    assert all(len(line) <= 120 for line in lines[:-2])  # a word of 200 letters is not broken
    assert [line[:2] for line in lines if line and not line.startswith(("Settings", "word", "a "))][:2] == ["- ", "- "]


@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_two_steps_of_several_arms_train_and_the_same_command_repeats_the_table(tmp_path, monkeypatch, capsys):
    few = {arm: table9.ARMS[arm] for arm in ("TFM++", "DCFM++ (R=2)")}
    monkeypatch.setattr(table9, "ARMS", few)
    monkeypatch.setattr(table9, "CLAIMS", table9.CLAIMS[:1])
    monkeypatch.setattr(step_times, "ROUNDS", 1)
    monkeypatch.setattr(arms, "MODEL", {**arms.MODEL, "width": 16, "mlp_dim": 16})
    words_of = arms.words_of
    monkeypatch.setattr(arms, "words_of", lambda *args: [*words_of(*args), "evals.validation.data.limit=16"])
    train = functools.partial(arms.train_arms, few)
    monkeypatch.setitem(catalog.TRAINED, "table9", catalog.TRAINED["table9"]._replace(train=train))
    words = ["table9", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]
    assert cli.run(reproduce.main, words) == 0
    first = (tmp_path / "table9.csv").read_text()
    rows = list(csv.DictReader(first.splitlines()))
    assert [row["config"] for row in rows] == list(few)
    assert all(0 < float(row["bits per byte"]) < 9 and math.isfinite(float(row["step ms"])) for row in rows)
    capsys.readouterr()
    assert cli.run(reproduce.main, words) == 0
    assert (tmp_path / "table9.csv").read_text() == first
    assert "seed0" not in capsys.readouterr().out  # nothing was trained again
