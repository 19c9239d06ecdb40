"""`dcvit train --seeds` and `--folds`: one run for each, their summary, and runs that fail."""

import argparse
import csv
import itertools
import json

import image_datasets
import numpy as np
import pytest
from scipy import stats
from trained_workdirs import TINY, load_params
from training_runs import same

from dcvit import cli
from dcvit.__main__ import dispatch
from dcvit.config import load as configs
from dcvit.config.values import with_fold
from dcvit.errors import ConfigError
from dcvit.runs import metrics, seeds
from dcvit.training import hooks
from dcvit.training.setup import make_setup

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
    (row,) = seeds.summarize({f"seed {i}": {"test/top1": value} for i, value in enumerate(values)})
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (row["mean"], row["± 95 %"]) == pytest.approx(((low + high) / 2, (high - low) / 2))
    assert (row["n"], row["seed 2"]) == (4, 0.90)
    one, missing = seeds.summarize({"seed 0": {"loss": 1.0}, "seed 1": {"val/loss": 2.0}})
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


@pytest.mark.parametrize("folder", ["pets", "pets/train"])
def test_folds_of_a_folder_hold_out_each_image_once_with_or_without_val_fraction(tmp_path, folder):
    """Balanced weights are counted in the images that train."""
    image_datasets.image_folder(tmp_path / "pets")
    (tmp_path / "pets" / "train" / "fox" / "000.jpg").unlink()
    spec = f"vit_folder:data_dir={tmp_path / folder},variant=ViT-mu/16,res=32,batch_size=8"
    config = configs.load(spec + ",val_fraction=0.2" * (folder != "pets"), ["class_weights=balanced", "model.depth=0"])
    runs = [make_setup(with_fold(config, f"fold {i} of 2")) for i in (1, 2)]
    held_out = [
        [source.describe(i) for i in range(len(source))]
        for source in (run.evaluators["val"].data.source for run in runs)
    ]
    assert sorted(itertools.chain(*held_out)) == sorted(map(str, (tmp_path / "pets" / "train").rglob("*.*")))
    for run in runs:
        counts = np.bincount(run.data.source.labels)
        assert run.task.weights["class_weights"] == pytest.approx(counts.sum() / (3 * counts))
    assert runs[0].task.weights != runs[1].task.weights


def test_folds_without_an_evaluator_or_of_chosen_examples_are_refused():
    digits = configs.load("vit_digits")
    assert with_fold(digits, "fold 1 of 2").evals.test.data.part == "fold 1 of 2"  # the only evaluator
    for words, message in (
        (["evals={}"], "needs the evaluator config.evals.val"),
        (["input.data.part=(0, 0.5)"], "omit"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_fold(configs.load("vit_digits", words), "fold 1 of 2")


@pytest.mark.exhaustive
def test_each_fold_is_a_run_and_the_table_has_their_sizes(tmp_path, capsys):
    assert command(tmp_path, "--folds", "2") == 0
    sizes = [metrics.read(tmp_path / f"fold{i}" / "metrics.jsonl")[-1]["test/n"] for i in (1, 2)]
    out = capsys.readouterr().out
    assert all(f"{size:,} are held out for config.evals.test\n" in out for size in sizes)
    rows = list(csv.DictReader((tmp_path / "folds.csv").read_text().splitlines()))
    assert list(rows[0])[-2:] == [f"fold {i} ({size:,})" for i, size in zip((1, 2), sizes, strict=True)]
    assert command(tmp_path) == 2
    assert "holds the runs of folds (fold1, …); resume them with --folds\n" in capsys.readouterr().err
    for other in (["--folds", "3"], ["--seeds", "2"]):
        assert command(tmp_path, *other) == 2
        assert "fold1 is not one of" in capsys.readouterr().err
    assert not (tmp_path / "fold3").exists()
