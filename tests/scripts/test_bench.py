"""Benchmarks run with small sizes, and the arms that they compare differ in what they are named for only."""

import json
import math

import dcmha as bench_dcmha
import input as bench_input
import native_aspect_ratio as bench_native
import pytest
import restart as bench_restart
import train as bench_train

from input_pipeline.preprocess.packing import place


@pytest.mark.slow
def test_table_of_attention_compares_every_implementation_with_plain_attention():
    rows = bench_dcmha.table("tiny", bench_dcmha.Shape(1, 8, 2, 8, step=True), rounds=1)
    assert {row["row"] for row in rows} == {
        "plain, XLA", "plain, jax.nn", "DC, reference", "plain, decode", "DC, decode", "grouped, best", "folded, best",
        "DC weights", "folded weights", "combine, sum", "combine, product",
    }  # fmt: skip
    assert all(math.isfinite(row["ratio"]) and row["ms_min"] <= row["ms"] <= row["ms_max"] for row in rows)


@pytest.mark.weekly
def test_the_benchmark_of_restarts_writes_its_file_and_its_table(tmp_path):
    """All arms resume from the checkpoint of their place."""
    pytest.importorskip("moto")
    page = tmp_path / "fault_tolerance.md"
    page.write_text(f"before\n\n{bench_restart.BEGIN}\n\nNot measured.\n\n{bench_restart.END}\nafter\n")
    bench_restart.main(["--tiny", "--config", "lm_stdlib", "--docs", str(tmp_path)])
    result = json.loads((tmp_path / "restart.json").read_text())
    assert {arm: len(times) for arm, times in result["seconds"].items()} == dict.fromkeys(
        ("disk, cold", "disk, warm", "S3 (moto, same machine), cold", "S3 (moto, same machine), warm"), 1
    )
    assert {*result["restoring"]} == {"disk", "S3 (moto, same machine)"}
    for where, (cold, warm) in result["restoring"].items():
        assert 0 < cold < result["seconds"][f"{where}, cold"][0], where
        assert 0 < warm < result["seconds"][f"{where}, warm"][0], where
    assert bench_restart.table(result) in page.read_text()


@pytest.mark.weekly
def test_the_input_pipeline_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_input, "BATCH", 2)
    monkeypatch.setattr(bench_input, "BATCHES", 1)
    result = bench_input.measure(bench_input.prepare(str(tmp_path), 16), rounds=1, batches=10)
    assert len(speeds := result["images_per_second"]) == 5
    assert all(0 < speed["min"] <= speed["median"] <= speed["max"] for speed in speeds.values())
    assert result["share_of_ceiling"][bench_input.DECODER]["median"] == 1


@pytest.mark.slow
def test_the_benchmark_of_packed_images_writes_its_file_and_its_table(tmp_path, library_promotion):
    page = tmp_path / "native_aspect_ratio.md"
    page.write_text(f"before\n\n{bench_native.BEGIN}\n\nNot measured.\n\n{bench_native.END}\nafter\n")
    bench_native.main(["--tiny", "--attention", "folded", "--docs", str(tmp_path)])
    result = json.loads(page.with_suffix(".json").read_text())
    assert result["tokens"]["tokens"] <= result["tokens"]["packed"] < result["tokens"]["padded"]
    measured = [(row["attention"], row["work"]) for row in result["results"]]
    assert measured == [("folded", "forward"), ("folded", "training step")]
    for row in result["results"]:
        for low, middle, high in (row["padded"], row["packed"], row["gain"]):
            assert 0 < low <= middle <= high
    assert page.read_text().startswith("before\n")
    assert bench_native.table(result) in page.read_text()
    assert page.read_text().endswith(f"{bench_native.END}\nafter\n")


def test_the_mixture_of_packed_images_loses_no_token_and_has_no_row_too_many():
    shape = bench_native.Shape("S/16", 64, 256, 1024)
    sizes = bench_native.mixture(shape, 16).prod(axis=1).tolist()
    packing = bench_native.fewest_rows(sizes, shape)
    assert place(sizes, packing)[:, 3].tolist() == sizes
    assert place(sizes, packing._replace(rows=packing.rows - 1))[:, 3].sum() < sum(sizes)
    assert sum(sizes) > 0.9 * packing.rows * packing.tokens


@pytest.mark.parametrize("build", [bench_train.vision(1, "float32"), bench_train.language("405M", 2, 1, "float32")])
@pytest.mark.parametrize(("composed", "plain"), [("DC, best", "plain, best"), ("folded, best", "grouped, best")])
def test_the_rows_of_a_ratio_differ_in_the_composition_only(build, composed, plain):
    """Windows, QK-norm, key heads and rematerialization would change the time, too."""
    first, second = (build(bench_train.ROWS[row])[0] for row in (composed, plain))
    fields = {name for name in vars(first) if not name.startswith("_") and name not in ("parent", "name")}
    differing = {name for name in fields if getattr(first, name) != getattr(second, name)}
    assert "compose" in differing
    assert differing <= {"compose", "branches", "groups", "static"}
