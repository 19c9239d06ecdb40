"""Tables and figures of the paper: formulas, models, fits and statistics, and tables of runs that are not trained."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from paper import ablations, costs, full, runs, scaling, table

from dcvit import cli
from dcvit.config.load import load
from dcvit.errors import MetricsError
from dcvit.hub.kinds import make_model


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for training: the function `metrics(arm, config)` of the test gives the last row of a run.

    `arm` names the folder of the workdir and that above it. The list `calls` has (arm, config) of each run.
    """

    def install(metrics, ms=None):
        calls = []

        def train(words):
            workdir = Path(words[3])
            config = load(words[1], [word.removeprefix("--config.") for word in words[4:]])
            arm = "/".join(workdir.parts[-3:-1])
            calls.append((arm, config))
            workdir.mkdir(parents=True, exist_ok=True)
            rows = [{"step": 0, "num_params": 7}, {"step": config.total_steps, **metrics(arm, config)}]
            (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        monkeypatch.setattr(runs, "train_command", train)
        monkeypatch.setattr(runs, "step_times", lambda models: {name: ms[name] for name in models})
        return calls

    return install


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table99"], "unknown table or figure at scale desk: 'table99'"),
        (["table9", "--steps", "0"], "--steps 0: expected 1 or more"),
    ],
    ids=str,
)
def test_errors_are_one_line(paper_main, words, message, capsys, tmp_path):
    assert cli.run(paper_main, [*words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_results_are_written_with_the_values_of_the_paper(tmp_path):
    rows = [{"config": "a", "ours": 1.23456, "paper": 2}, {"config": "b", "ours": 12345.6, "paper": None}]
    found = table.Table("t", "Title", rows, ["A note."], table.bars(rows, "config", "ours", "paper"))
    table.write(found, tmp_path / "new")
    assert (tmp_path / "new" / "t.md").read_text() == (
        "# Title\n\n| config | ours | paper |\n| --- | --- | --- |\n| a | 1.235 | 2 |\n| b | 12,346 | – |\n\n"
        "![Title](t.png)\n\n- A note.\n"
    )
    with (tmp_path / "new" / "t.csv").open(newline="") as file:
        assert list(csv.reader(file))[1] == ["a", "1.23456", "2"]
    assert (tmp_path / "new" / "t.png").read_bytes().startswith(b"\x89PNG")
    assert [table.shown(x) for x in (-4e-16, 1.5e-7, -0.25)] == ["0", "1.5e-07", "-0.25"]


# Costs


@pytest.mark.parametrize(("size", "length", "params", "flops"), costs.TABLE_2)
def test_formulas_of_table_2_round_to_the_paper(size, length, params, flops):
    net = costs.layers(size, False, 1)
    head_dim, rho = net.width // net.num_heads, length / net.width
    assert round(100 * costs.extra_parameters(head_dim), 1) == params
    assert round(100 * costs.extra_operations(head_dim, rho), 1) == pytest.approx(flops, abs=0.051)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.exhaustive) for case in costs.TABLE_2[:-1]), costs.TABLE_2[-1]]
)
def test_table_2_counts_models_of_the_paper(case, monkeypatch):
    """By hand: 4·(M·2RH + (2RH)² + M·H) parameters, and the operations of Appendix E for the visible pairs."""
    monkeypatch.setattr(costs, "TABLE_2", (case,))
    (row,) = costs.table2().rows
    size, length, *_ = case
    net = costs.layers(size, True, 1)
    width, heads, rank = net.width, net.num_heads, net.rank
    extra = 4 * (width * 2 * rank * heads + (2 * rank * heads) ** 2 + width * heads)
    plain, pairs = 12 * width**2, length * (length + 1) / 2
    assert row["params, counted %"] == pytest.approx(100 * extra / plain, rel=2e-3)  # biases and norms
    expected = (length * extra + pairs * 4 * heads * (2 * rank + 1)) / (length * plain + pairs * 2 * width)
    assert row["FLOPs, counted %"] == pytest.approx(100 * expected, rel=1e-6)


@pytest.mark.exhaustive
def test_table_7_rounds_to_the_parameters_of_the_paper():
    rows = {row["model"]: row for row in costs.table7().rows}
    assert rows["DCViT-S/16"]["parameters"] == 22_703_080  # configs/vit_i1k.py
    assert rows["DCViT-S/16"]["relative parameters"] == pytest.approx(1.03, abs=0.005)
    for name, millions in (("ViT-S/16", 22), ("ViT-M/16", 39)):
        assert round(rows[name]["parameters"] / 1e6) == millions == rows[name]["parameters in millions, paper"]
    assert [(row["layers"], row["width"], row["MLP width"], row["heads"]) for row in rows.values()] == [
        (12, 384, 1536, 6), (12, 384, 1536, 6), (12, 512, 2048, 8),
    ]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", full.RUNS)
def test_commands_of_full_runs_load_and_hours_are_those_of_the_compiler(name):
    rows = full.table(name).rows
    assert len({re.search("RUNS/.*", row["command"])[0] for row in rows}) == len(rows)
    for row in rows:
        words = shlex.split(row["command"].strip("`"))
        assert words[:3] == ["dcvit", "train", "--config"]
        config = load(words[3].replace("DATA", "/data/pile"), [w.removeprefix("--config.") for w in words[6:]])
        make_model(config)
        if row["hours"] is None:
            assert row["chip hours"] is None
            continue
        peak = {"v5e": 197e12, "v5p": 459e12, "v6e": 918e12}[row["slice"].partition(":")[0]]
        assert row["steps"] * row["PFLOP per step"] * 1e15 < row["chip hours"] * 3600 * peak
        assert row["chip hours"] == pytest.approx(row["hours"] * row["chips"])


def test_hours_and_bounds_on_the_page_are_estimates_and_measurements():
    """A chip has 256 images in a step; attention of 12 layers takes 12 · 4.43 ms of an H200."""
    rows = {row["run"]: row for row in full.table("table8").rows}
    images = 1_268_355 * 300 // 1024 * 1024
    estimates = json.loads((full.DOCS / "tpu_step.json").read_text())
    seconds = {(row["config"], row["topology"]): row["seconds"] for row in estimates}
    page = (full.DOCS / "paper.md").read_text()
    for name in ("ViT-S/16", "DCViT-S/16"):
        for chip, count in (("v5e", 32), ("v6e", 8)):
            rate = count * 256 / seconds[f"vit_i1k:variant={name}", f"{chip}:2x2"]
            hours = images / rate / 3600
            if chip == rows[name]["slice"].partition(":")[0]:
                assert rows[name]["hours"] == pytest.approx(hours)
            assert f"| {name} | {chip}-{count} | {rate:,.0f} | {0.3 * hours:.1f} | {hours:.1f} |" in page
    assert rows["ViT-M/16"]["hours"] is None
    bound = f"{round(full.gpu_bound(), -2):,.0f}"
    assert bound == "38,500"
    assert f"not measured; at most {bound}" in page


# Runs and statistics


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([-3.0, -3.1, -2.9], "holds (-3.0000 ± 0.2484)"),
        ([3.0, 3.1, 2.9], "does not hold (+3.0000 ± 0.2484)"),
        ([-3.0, 1.0], "undecided (-1.0000 ± 25.4124)"),
        ([-1e-9, 1e-10], "undecided (+0.0000 ± 0.0000)"),  # no negative zero
    ],
)
def test_a_statement_holds_if_the_interval_excludes_zero(differences, expected):
    assert runs.decision(differences) == expected
    opposite = {"holds": "does not hold", "does not hold": "holds"}
    word = expected.split(" (")[0]
    assert runs.decision(differences, lower=False).startswith(opposite.get(word, word))


def test_runs_at_equal_time_have_their_own_steps_and_the_schedule_over_them(fake, tmp_path):
    fields = {"plain": {"compose": None}, "good": {"rank": 1}, "bad one": {"rank": 3}}
    losses = {"plain": 3.0, "good": 2.0, "good=time": 2.4, "bad_one": 4.0, "bad_one=time": 3.5}
    calls = fake(
        lambda arm, config: {runs.METRIC: losses[arm.split("/")[1]] + config.seed},
        {"plain": 10.0, "good": 12.5, "bad one": 5.0},
    )

    def make(name, steps):
        return runs.language_model(runs.folder_of(tmp_path, name), fields[name], steps)

    found = runs.compare(make, [*fields], [0, 1], 10)
    steps = {arm.split("/")[1]: config.total_steps for arm, config in calls}
    assert steps == {"plain": 10, "good": 10, "good=time": 8, "bad_one": 10, "bad_one=time": 20}
    assert len(calls) == 2 * len(steps)
    for _, config in calls:
        assert config.schedule.to_dict() == {"decay_type": "cosine", "warmup_percent": 5, "end": 0.1}
    assert [found.at_steps[name] for name in fields] == [[3, 4], [2, 3], [4, 5]]
    assert [found.at_time[name] for name in fields] == [[3, 4], [2.4, 3.4], [3.5, 4.5]]
    assert (found.steps, found.parameters["good"]) == ({"plain": 10, "good": 8, "bad one": 20}, 7)
    runs.step_times = None  # measured once; the fixture restores it
    assert runs.compare(make, [*fields], [0], 10).steps == found.steps


def test_a_run_that_diverged_is_an_error_and_not_left_out(fake, tmp_path):
    fake(lambda arm, config: {runs.METRIC: None})
    with pytest.raises(MetricsError, match=r"arm/seed0: validation/bits_per_byte is not a number after the last step"):
        runs.train({"arm": runs.language_model(tmp_path / "arm", {}, 3)}, [0])


def test_tables_8_and_9_have_paired_differences_beside_the_paper(fake, tmp_path, monkeypatch):
    """A DCViT takes 1.6 times the time of a ViT, and accuracy grows by 0.02 a seed."""
    top1 = {"digits/ViT": 0.5, "digits/DCViT": 0.6, "digits/DCViT=time": 0.45}
    top1 |= {"scenes/ViT": 0.2, "scenes/DCViT": 0.3, "scenes/DCViT=time": 0.2}
    calls = fake(lambda arm, config: {"test/top1": top1[arm] + 0.02 * config.seed}, {"ViT": 10.0, "DCViT": 16.0})
    found = ablations.table8(tmp_path / "table8", [0, 1], 80)
    assert {make_model(config).compose for arm, config in calls if "DC" in arm} == {"both"}
    rows = {row["model"]: row for row in found.rows}
    plain, composed = rows["ViT on digits"], rows["DCViT on digits"]
    assert plain["top-1 %"] == pytest.approx(51)
    assert plain["± 95 %"] == pytest.approx(12.706, rel=1e-3)  # t of one degree of freedom
    assert composed["difference"] == pytest.approx(10)
    assert (plain["ImageNet-1k, 300 epochs, paper"], composed["ImageNet-1k, 300 epochs, paper"]) == (79.8, 80.1)
    timed = rows["DCViT on digits, equal time"]
    assert (timed["steps"], timed["difference"]) == (50, pytest.approx(-5))
    assert "DCViT is more accurate than ViT on digits at equal time: does not hold (-5.00 ± 0.00)" in found.notes
    assert "DCViT is more accurate than ViT on scenes at equal time: undecided (+0.00 ± 0.00)" in found.notes

    fake(lambda arm, config: {runs.METRIC: 2.0 + 0.1 * config.seed}, dict.fromkeys(ablations.ARMS, 1.0))
    found = ablations.table9(tmp_path / "table9", [0, 1], 5)
    assert [row["config"] for row in found.rows] == [*ablations.ARMS]
    assert sum("undecided (+0.0000 ± 0.0000)" in note for note in found.notes) == len(ablations.CLAIMS) == 9


# Scaling curves


def some_points(operations):
    return [scaling.Point({}, 1, 1, x) for x in operations]


def test_compute_equivalents_are_the_horizontal_distance_to_the_line_of_the_plain_family():
    plain, composed = some_points([1e10, 1e11, 1e12]), some_points([2e10, 2e11, 2e12])
    losses = np.stack([50 * np.array([1e10, 1e11, 1e12]) ** -0.1, 50 * (1.8 * np.array([2e10, 2e11, 2e12])) ** -0.1])
    np.testing.assert_allclose(scaling.equivalents(plain, composed, losses), 1.8, rtol=1e-9)
    log_a, b = scaling.fit([1e10, 1e12], 50 * np.array([1e10, 1e12]) ** -0.1)
    assert (b, np.exp(log_a)) == pytest.approx((0.1, 50))


@pytest.mark.slow
def test_intervals_contain_the_equivalent_of_each_seed_and_vanish_for_equal_seeds():
    plain, composed = some_points([1e10, 1e11]), some_points([1e10, 1e11])
    losses = np.array([[4.0, 3.0], [3.8, 2.9]])
    same = scaling.bootstrapped(plain, composed, np.stack([losses] * 3))
    np.testing.assert_allclose(same[:, 0], same[:, 1])
    np.testing.assert_allclose(same[:, 0], scaling.equivalents(plain, composed, losses))
    lower = losses - np.array([[0, 0], [0.1, 0.1]])
    low, high = scaling.bootstrapped(plain, composed, np.stack([losses, lower]))[0]
    each = [scaling.equivalents(plain, composed, some)[0] for some in (losses, lower)]
    assert (low, high) == pytest.approx((min(each), max(each)))
