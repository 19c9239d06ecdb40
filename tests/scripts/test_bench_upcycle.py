"""The comparison of upcycling with training from scratch: which runs its table has, and how it compares them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_upcycle
from bench_upcycle import CONTINUED, CONTROL, FROM_SCRATCH, METRIC


def write_run(workdir, start, end, total=6):
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"total_steps": 6}))
    rows = [{"step": 0, "num_params": 12345, METRIC: start}, {"step": total, METRIC: end}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_table_pairs_the_complete_runs_of_each_seed(tmp_path):
    values = {"plain": (3.0, 5.0), "composed": (2.0, 4.0), "plain, then composed": (2.5, 4.5), CONTROL: (3.25, 5.25)}
    assert values.keys() == {*FROM_SCRATCH, *CONTINUED}
    for seed in range(2):
        write_run(tmp_path / "first" / f"seed{seed}", 8.0, 4.0)
        for arm, ends in values.items():
            write_run(tmp_path / arm / f"seed{seed}", 4.0 + 0.001 * seed, ends[seed])
    write_run(tmp_path / CONTROL / "seed2", 4.0, 99.0, total=3)  # was interrupted
    result = bench_upcycle.collect(tmp_path)
    assert result["seeds"] == [0, 1]
    assert result["step_0"] == pytest.approx(0.001)
    by_arm = {row["arm"]: row for row in result["rows"]}
    assert by_arm["composed"]["mean"] == 3.0
    assert by_arm["composed"]["interval"] == pytest.approx(12.7062, rel=1e-4)  # t of one degree of freedom
    assert by_arm["composed"]["difference"] == -1.25
    assert by_arm["composed"]["difference_interval"] == 0
    lines = bench_upcycle.lines(result)
    assert lines[2] == "| plain | 600 | 12,345 | 4.000 ± 12.706 | −0.250 ± 0.000 |"
    assert lines[-1] == f"| {CONTROL} | 400 + 200 | 12,345 | 4.250 ± 12.706 | – |"
