"""The comparison of compositions with grouped queries: which runs its table has, and how it compares them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_key_heads as bench

from dcvit.config import load
from dcvit.training.model import make_model


def write_run(workdir, bits, seconds, total=600):
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"total_steps": 600}))
    rows = [{"step": 0, "num_params": 12345}, {"step": total, bench.METRIC: bits}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workdir / "timing.jsonl").write_text(json.dumps({"step": 1, "step_seconds": seconds}) + "\n")


def test_table_pairs_the_complete_runs_of_each_seed_with_the_plain_model_of_as_many_key_heads(tmp_path):
    for seed in range(3):
        for n, arm in bench.arms():
            bits = 2 + seed + n - (0.25 if arm != bench.PLAIN else 0)
            interrupted = seed == 2 and arm == "complete"
            write_run(bench.workdir(tmp_path, n, arm, seed), bits, 0.01 * (seed + 1), 3 if interrupted else 600)
    result = bench.collect(tmp_path)
    assert result["seeds"] == [0, 1]
    assert [(row["key_heads"], row["arm"]) for row in result["rows"]] == bench.arms()
    for row in result["rows"]:
        plain = row["arm"] == bench.PLAIN
        assert row["mean"] == pytest.approx(2.5 + row["key_heads"] - (0 if plain else 0.25))
        assert (row["difference"], row["difference_interval"]) == (0 if plain else -0.25, 0)
        assert row["step_ms"] == pytest.approx(15)
    assert bench.lines(result)[2] == "| 1 | plain | 12,345 | 16 | 15.0 | 3.500 ± 6.353 | – |"
    assert bench.lines(result)[-1] == "| 4 | complete | 12,345 | 144 | 15.0 | 6.250 ± 6.353 | −0.250 ± 0.000 |"


@pytest.mark.parametrize(("key_heads", "arm"), bench.arms())
def test_arms_have_the_composition_that_they_are_named_for(key_heads, arm, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bench, "run", lambda spec, workdir, *words: calls.append((spec, workdir, words)))
    bench.train_seed(tmp_path, 3)
    ((spec, _, words),) = [call for call in calls if call[1] == bench.workdir(tmp_path, key_heads, arm, 3)]
    config = load(spec, words)
    model = make_model(config)
    assert (model.num_heads, model.num_key_heads, config.seed) == (bench.HEADS, key_heads, 3)
    assert (model.compose is None) == (arm == bench.PLAIN)
    assert ("k" in model.branches) == (arm in (bench.PLAIN, "complete"))
    folds = model.branches == "q" and model.groups % key_heads == 0
    assert folds == (arm == "DCFlash" or (arm, key_heads) == ("query-wise", 1))
