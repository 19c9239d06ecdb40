"""The comparison of DCViT and ViT on scenes: which runs its table has, and how long each arm trains."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_scenes as bench

from dcvit.config.load import load
from dcvit.reproduction.step_times import StepTimes
from dcvit.training.model import make_model


def write_run(workdir, accuracy, complete=True):
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"total_steps": 9}))
    rows = [{"step": 0, "num_params": 12345}, {"step": 9 if complete else 3, bench.METRIC: accuracy}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_table_pairs_the_complete_runs_of_each_seed_with_the_vit_of_equal_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "step_times", lambda arms, _: StepTimes(dict.fromkeys(arms, 12.5), "a machine"))
    for seed in range(3):
        for i, arm in enumerate(bench.ATTENTION):
            write_run(tmp_path / arm / f"seed{seed}", 0.5 + 0.01 * seed + 0.02 * i, seed < 2 or arm != bench.LONG)
    result = bench.collect(tmp_path)
    assert result["seeds"] == [0, 1]
    assert [row["difference"] for row in result["rows"]] == pytest.approx([0, 2, 4])
    table = bench.lines(result)
    assert table[2] == f"| ViT | {bench.STEPS:,} | 12.5 | 12,345 | 50.5 ± 6.4 | – |"
    longer = f"{round(bench.STEPS * bench.LONGER):,}"
    assert table[4] == f"| ViT, equal time | {longer} | 12.5 | 12,345 | 54.5 ± 6.4 | +4.0 ± 0.0 |"


def test_arms_differ_in_composition_learning_rate_and_steps_only(monkeypatch, tmp_path):
    calls = {}
    monkeypatch.setattr(bench, "run", lambda spec, workdir, *words: calls.update({workdir: load(spec, words)}))
    bench.train_seed(tmp_path, 3)
    found = {arm: calls[tmp_path / arm / "seed3"] for arm in bench.ATTENTION}
    assert {arm: make_model(config).compose for arm, config in found.items()} == {
        "ViT": None, "DCViT": "both", "ViT, equal time": None
    }  # fmt: skip
    assert [found[arm].total_steps for arm in ("ViT", "DCViT")] == [bench.STEPS] * 2
    assert found["ViT, equal time"].total_steps == round(bench.STEPS * bench.LONGER)
    for config in found.values():
        assert config.seed == 3
        assert config.lr in bench.TRIED
        config.unlock()
        with config.ignore_type():
            config.model.compose = config.lr = config.total_steps = None
    assert len({config.to_json() for config in found.values()}) == 1


def test_tuning_tries_every_learning_rate_on_the_validation_split(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(
        bench.seeded_runs, "run", lambda spec, workdir, *words, metric: calls.append((load(spec, words), metric))
    )
    bench.tune(tmp_path)
    tried = [(make_model(config).compose, config.lr) for config, _ in calls]
    assert sorted(tried, key=str) == sorted(((c, lr) for c in (None, "both") for lr in bench.TRIED), key=str)
    assert {(config.seed, config.total_steps, metric) for config, metric in calls} == {
        (100, bench.STEPS, "validation/top1")
    }
