"""`dcvit train --seeds`: one run per seed, their summary, and seeds that fail."""

import argparse
import csv
import json

import numpy as np
import pytest
from scipy import stats
from trained_workdirs import TINY, load_params
from training_runs import same

from dcvit import cli
from dcvit.__main__ import dispatch
from dcvit.runs import metrics, seeds
from dcvit.training import hooks

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.mark.parametrize(("text", "expected"), [("0,1,2", [0, 1, 2]), ("3", [0, 1, 2]), ("7,5", [7, 5])])
def test_seeds_are_a_list_or_a_number(text, expected):
    assert seeds.parse_seeds(text) == expected


@pytest.mark.parametrize("text", ["0", "-1,2", "1,1"])
def test_other_seeds_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        seeds.parse_seeds(text)


def test_interval_is_that_of_students_t_distribution():
    values = [0.91, 0.95, 0.90, 0.97]
    (row,) = seeds.summarize({seed: {"test/top1": value} for seed, value in enumerate(values)})
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (row["mean"], row["± 95 %"]) == pytest.approx(((low + high) / 2, (high - low) / 2))
    assert (row["n"], row["seed 2"]) == (4, 0.90)
    one, missing = seeds.summarize({0: {"loss": 1.0}, 1: {"val/loss": 2.0}})
    assert (one["± 95 %"], one["n"], one["seed 1"], missing["seed 0"]) == (None, 1, None, None)


def test_the_folder_of_seeds_is_no_workdir_of_a_single_run(tmp_path, capsys):
    seeds.workdir_of(tmp_path, 3).mkdir()
    (seeds.workdir_of(tmp_path, 3) / "config.json").touch()
    assert command(tmp_path) == 2
    assert (
        capsys.readouterr().err == f"error: {tmp_path} holds the runs of seeds (seed3, …); resume them with --seeds\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["seed3"]


def command(workdir, *words):
    options = [f"--config.{key}={value}" for key, value in TINY.items()]
    return cli.run(dispatch, ["train", "--config", "vit_digits", "--workdir", str(workdir), *options, *words])


@pytest.mark.exhaustive
def test_each_seed_is_a_run_and_a_failed_one_is_resumed(tmp_path, capsys, monkeypatch):
    real = hooks.NonFiniteGuard.check

    def check(self, result):
        if self.run.setup.config.seed == 5 and result.step == 2:
            raise FloatingPointError("step 2: the loss is nan; stopped")
        real(self, result)

    folder = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(hooks.NonFiniteGuard, "check", check)
        assert command(folder, "--seeds", "3,5") == 2
    captured = capsys.readouterr()
    assert captured.err == "error: seed 5: step 2: the loss is nan; stopped\n"
    assert "1 of 2 seeds" in captured.out
    assert command(folder, "--seeds", "3,5") == 0
    assert capsys.readouterr().out.count("the run is complete") == 1
    configs = [json.loads((folder / f"seed{seed}" / "config.json").read_text()) for seed in (3, 5)]
    assert [config["seed"] for config in configs] == [3, 5]
    rows = {row["metric"]: row for row in csv.DictReader((folder / "seeds.csv").read_text().splitlines())}
    assert not same(*(load_params(folder / f"seed{seed}") for seed in (3, 5)))
    final = [metrics.read(folder / f"seed{seed}" / "metrics.jsonl")[-1] for seed in (3, 5)]
    assert final[0]["loss"] != final[1]["loss"]
    assert rows.keys() == {"loss", "test/top1", "test/top5", "test/mean_recall", "test/loss"}
    for key, row in rows.items():
        assert [float(row[f"seed {seed}"]) for seed in (3, 5)] == [last[key] for last in final]
        assert float(row["mean"]) == pytest.approx(np.mean([last[key] for last in final]))
    assert len((folder / "seeds.md").read_text().splitlines()) == 2 + len(rows)


@pytest.mark.slow
def test_invalid_command_is_one_line_and_nothing_is_written(tmp_path, capsys):
    assert command(tmp_path / "runs", "--seeds", "2", "--config.seed=1") == 2
    err = capsys.readouterr().err
    assert "give either --seeds or --config.seed" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_workdir_of_a_run_is_refused(digits_workdir, capsys):
    assert command(digits_workdir, "--seeds", "2") == 2
    assert "holds a run; --seeds needs a folder" in capsys.readouterr().err
