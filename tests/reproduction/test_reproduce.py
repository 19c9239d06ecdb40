"""The command reproduce: formulas of tables, runs of a few steps, results, and commands that load."""

import csv
import re
import shlex

import pytest

from dcvit import cli, reproduce
from dcvit.config.load import load
from dcvit.hub.kinds import make_model
from dcvit.reproduction import costs, full, overhead, tables


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


@pytest.mark.parametrize(("size", "length", "params", "flops"), costs.TABLE_2)
def test_formulas_of_table_2_round_to_the_paper(size, length, params, flops):
    net = costs.one_layer(size, False, 1)
    head_dim, rho = net.width // net.num_heads, length / net.width
    assert round(100 * costs.extra_parameters(head_dim), 1) == params
    assert round(100 * costs.extra_operations(head_dim, rho), 1) == pytest.approx(flops, abs=0.051)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.exhaustive) for case in costs.TABLE_2[:-1]), costs.TABLE_2[-1]]
)
def test_table_2_counts_models_of_the_paper(case, monkeypatch):
    """By hand: 4·(M·2RH + (2RH)² + M·H) parameters, and the operations of Appendix E for all pairs."""
    monkeypatch.setattr(costs, "TABLE_2", (case,))
    (row,) = costs.table2().rows
    size, length, *_ = case
    assert (row["model"], row["S"]) == (size, length)
    net = costs.one_layer(size, True, 1)
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
    "size", [size if size == "6.9B" else pytest.param(size, marks=pytest.mark.exhaustive) for size in overhead.PAPER]
)
def test_bounds_of_table_6_are_above_the_speed_of_the_paper(size, monkeypatch):
    monkeypatch.setattr(overhead, "PAPER", {size: overhead.PAPER[size]})
    (bound,) = (row for row in overhead.bounds() if row["case"] == f"{size} training, FLOPs bound, same windows")
    assert bound["speed %"] > overhead.PAPER[size][0]


@pytest.mark.exhaustive
def test_table_7_rounds_to_the_parameters_of_the_paper():
    rows = {row["model"]: row for row in costs.table7().rows}
    assert list(rows) == list(costs.TABLE_7)
    assert [row["parameters"] for row in rows.values()][1] == 22_703_080  # configs/vit_i1k.py
    for name, millions in (("ViT-S/16", 22), ("ViT-M/16", 39)):
        assert round(rows[name]["parameters"] / 1e6) == millions == rows[name]["parameters in millions, paper"]
    assert rows["DCViT-S/16"]["relative parameters"] == pytest.approx(1.03, abs=0.005)
    assert [row["layers"] for row in rows.values()] == [12, 12, 12]
    assert [(row["width"], row["MLP width"], row["heads"]) for row in rows.values()] == [
        (384, 1536, 6), (384, 1536, 6), (512, 2048, 8),
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_table_10_has_bounds_in_the_order_of_the_windows():
    rows = {row["local:global"]: row for row in costs.table10().rows}
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


def test_differences_of_zero_have_neither_sign_nor_digits_of_rounding():
    assert [tables.shown(x) for x in (-4e-16, 1.5e-7, -0.25)] == ["0", "1.5e-07", "-0.25"]


def test_results_are_written_with_the_values_of_the_paper(tmp_path):
    rows = [{"config": "a", "ours": 1.23456, "paper": 2}, {"config": "b", "ours": 12345.6, "paper": None}]
    table = tables.Table("t", "Title", rows, ("A note.",), tables.Chart("config", "ours", None, "paper"))
    tables.write(table, tmp_path / "new")
    assert (tmp_path / "new" / "t.md").read_text() == (
        "# Title\n\n| config | ours | paper |\n| --- | --- | --- |\n| a | 1.235 | 2 |\n| b | 12,346 | – |\n\n"
        "![Title](t.png)\n\nA note.\n"
    )
    with (tmp_path / "new" / "t.csv").open(newline="") as file:
        assert list(csv.reader(file))[1] == ["a", "1.23456", "2"]
    assert (tmp_path / "new" / "t.png").read_bytes().startswith(b"\x89PNG")
