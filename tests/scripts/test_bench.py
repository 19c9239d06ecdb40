"""Benchmarks run with small sizes, and the arms that they compare differ in what they are named for only."""

import math

import dcmha as bench_dcmha
import input as bench_input
import pytest
import train as bench_train


@pytest.mark.slow
def test_table_of_attention_compares_every_implementation_with_plain_attention():
    rows = bench_dcmha.table("tiny", bench_dcmha.Shape(1, 8, 2, 8, step=True), rounds=1)
    assert {row["row"] for row in rows} == {
        "plain, XLA", "plain, jax.nn", "DC, reference", "plain, decode", "DC, decode", "grouped, best", "folded, best",
        "DC weights", "folded weights", "combine, sum", "combine, product",
    }  # fmt: skip
    assert all(math.isfinite(row["ratio"]) and row["ms_min"] <= row["ms"] <= row["ms_max"] for row in rows)


@pytest.mark.weekly
def test_the_input_pipeline_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_input, "BATCH", 2)
    monkeypatch.setattr(bench_input, "BATCHES", 1)
    speeds = bench_input.measure(bench_input.prepare(str(tmp_path), 16), rounds=2)
    assert len(bench_input.lines(speeds)) == 4 + len(speeds) == 7
    assert all(speed > 0 for values in speeds.values() for speed in values)


@pytest.mark.parametrize("build", [bench_train.vision(1, "float32"), bench_train.language("405M", 2, 1, "float32")])
@pytest.mark.parametrize(("composed", "plain"), [("DC, best", "plain, best"), ("folded, best", "grouped, best")])
def test_the_rows_of_a_ratio_differ_in_the_composition_only(build, composed, plain):
    """Windows, QK-norm, key heads and rematerialization would change the time, too."""
    first, second = (build(bench_train.ROWS[row])[0] for row in (composed, plain))
    fields = {name for name in vars(first) if not name.startswith("_") and name not in ("parent", "name")}
    differing = {name for name in fields if getattr(first, name) != getattr(second, name)}
    assert "compose" in differing
    assert differing <= {"compose", "branches", "groups", "static"}
