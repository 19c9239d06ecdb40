"""The command line of benchmarks that compare seeds: runs that it skips or refuses, and the file that it writes."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import seeded_runs

from dcvit import train
from dcvit.errors import ConfigError, MetricsError
from dcvit.reproduction import seeded

METRIC = "validation/accuracy"


def write_run(workdir, value, total=9, **config):
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"total_steps": 9} | config))
    rows = [{"step": 0, "num_params": 5}, {"step": total, METRIC: value}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_seeds_of_another_config_are_not_mixed_into_a_table(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "a" / f"seed{seed}", 0.5, seed=seed, lr=0.1 if seed == 2 else 0.2)
    with pytest.raises(ConfigError, match=r"seed2 holds a run of another config: config\.lr \(saved: 0\.1, now"):
        seeded_runs.complete_seeds({"a": tmp_path / "a"}, METRIC)


def test_seeds_with_other_evaluations_are_not_mixed_into_a_table(tmp_path):
    for seed in range(2):
        write_run(tmp_path / "a" / f"seed{seed}", 0.5, seed=seed, evals={"validation": {"limit": 10 + seed}})
    with pytest.raises(ConfigError, match=r"config\.evals\.validation\.limit"):
        seeded_runs.complete_seeds({"a": tmp_path / "a"}, METRIC)


def test_only_folders_of_seeds_with_all_arms_complete_count(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "a" / f"seed{seed}", 0.5 + seed, seed=seed, tensorboard=bool(seed))  # may differ
        write_run(tmp_path / "b" / f"seed{seed}", 0.5, total=3 if seed == 2 else 9, seed=seed)
    (tmp_path / "a" / "seed1.old").mkdir()
    found = seeded_runs.complete_seeds({arm: tmp_path / arm for arm in "ab"}, METRIC)
    assert found == {0: {"a": 0.5, "b": 0.5}, 1: {"a": 1.5, "b": 0.5}}


def test_a_run_that_diverged_is_an_error_and_not_left_out(tmp_path):
    write_run(tmp_path / "a" / "seed0", None)
    with pytest.raises(MetricsError, match="seed0: validation/accuracy is not a number after the last step"):
        seeded_runs.complete_seeds({"a": tmp_path / "a"}, METRIC)


def test_a_complete_run_is_skipped_only_if_its_config_is_that_of_the_command(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(train, "main", calls.append)
    words = ["tensorboard=False", "evals.validation.log_percent=100"]
    config = seeded.configs.load("vit_scenes:steps=9", words)
    write_run(tmp_path / "run", 0.5, **json.loads(config.to_json()))
    seeded_runs.run("vit_scenes:steps=9", tmp_path / "run", metric=METRIC)
    with pytest.raises(ConfigError, match=r"run holds a run of another config: config\.lr .*Remove it"):
        seeded_runs.run("vit_scenes:steps=9", tmp_path / "run", "lr=0.5", metric=METRIC)
    assert calls == []


def run_main(tmp_path, monkeypatch, value, train_seed=lambda out, seed: None):
    arguments = ["bench", "--out", str(tmp_path), "--seeds", "2", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    result = {"seeds": [0, 1], "value": value}
    seeded_runs.main("", "bench", train_seed, lambda out: result, lambda found: ["table"], lambda found: "about")


def test_measurements_are_written_as_valid_json_or_not_at_all(tmp_path, monkeypatch, capsys):
    run_main(tmp_path, monkeypatch, 1.5)
    assert json.loads((tmp_path / "found.json").read_text()) == {"seeds": [0, 1], "value": 1.5}
    for value in (float("nan"), float("inf")):
        with pytest.raises(SystemExit, match=r"^error: a measurement is not a finite number$"):
            run_main(tmp_path, monkeypatch, value)
    assert json.loads((tmp_path / "found.json").read_text())["value"] == 1.5


def test_errors_of_runs_are_one_line(tmp_path, monkeypatch):
    def fail(out, seed):
        raise ConfigError("seed0 holds a run of another config")

    with pytest.raises(SystemExit, match=r"^error: seed0 holds a run of another config$"):
        run_main(tmp_path, monkeypatch, 1.5, fail)
