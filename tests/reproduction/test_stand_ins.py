"""Tables 7 and 8: counted models round to the paper's, and runs on stand-ins are paired by seed."""

import json
from pathlib import Path

import pytest

from dcvit.config.load import load
from dcvit.errors import ConfigError
from dcvit.reproduction import step_times, table8

MS = {"ViT": 10.0, "DCViT": 16.0}
TOP1 = {"digits/ViT": 0.5, "digits/DCViT": 0.6, "digits/DCViT=time": 0.45}
TOP1 |= {"scenes/ViT": 0.2, "scenes/DCViT": 0.3, "scenes/DCViT=time": 0.2}


@pytest.mark.exhaustive
def test_table_7_rounds_to_the_parameters_of_the_paper():
    rows = {row["model"]: row for row in table8.table7().rows}
    assert list(rows) == list(table8.SIZES)
    assert [row["parameters"] for row in rows.values()][1] == 22_703_080  # configs/vit_i1k.py
    for name, millions in (("ViT-S/16", 22), ("ViT-M/16", 39)):
        assert round(rows[name]["parameters"] / 1e6) == millions == rows[name]["parameters in millions, paper"]
    assert rows["DCViT-S/16"]["relative parameters"] == pytest.approx(1.03, abs=0.005)
    assert [row["layers"] for row in rows.values()] == [12, 12, 12]
    assert [(row["width"], row["MLP width"], row["heads"]) for row in rows.values()] == [
        (384, 1536, 6), (384, 1536, 6), (512, 2048, 8),
    ]  # fmt: skip


@pytest.fixture
def train(monkeypatch):
    """A stand-in for `dcvit train` that records its runs, without measured times; seed 1 has 0.02 more than seed 0."""
    monkeypatch.setattr(step_times, "step_times", lambda configs, folder: step_times.StepTimes(MS, "a machine"))
    calls = []

    def run(words):
        workdir = Path(words[3])
        config = load(words[1], [word.removeprefix("--config.") for word in words[4:]])
        arm = "/".join(workdir.parts[-3:-1])
        calls.append((arm, config))
        workdir.mkdir(parents=True)
        (workdir / "config.json").write_text(config.to_json())
        rows = [{"step": 0, "num_params": 7}]
        rows.append({"step": config.total_steps, table8.METRIC: TOP1[arm] + 0.02 * config.seed})
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    run.calls = calls
    return run


@pytest.mark.slow
def test_runs_differ_in_attention_and_steps_only_and_equal_time_follows_from_the_times(train, tmp_path):
    assert table8.train(tmp_path, [0], train, 80) == 0
    assert [(arm, config.total_steps) for arm, config in train.calls] == list(
        zip(TOP1, [80, 80, 50] * 2, strict=True)
    )  # fmt: skip
    for arm, config in train.calls:
        assert config.model.compose == (None if arm.endswith("/ViT") else "both")
        assert config.schedule.decay_type == "cosine"
        assert config.schedule.warmup_percent == train.calls[0 if arm.startswith("digits") else 3][1].schedule[
            "warmup_percent"
        ]  # fmt: skip
    assert table8.train(tmp_path, [0], train, 80) == 0
    assert len(train.calls) == 6


@pytest.mark.slow
def test_table_8_has_paired_differences_beside_the_paper(train, tmp_path):
    table8.train(tmp_path, [0, 1], train, 80)
    table = table8.table8(tmp_path, [0, 1], 80)
    rows = {row["model"]: row for row in table.rows}
    assert len(rows) == 6
    plain, composed = rows["ViT on digits"], rows["DCViT on digits"]
    assert plain["top-1 %"] == pytest.approx(51)
    assert plain["± 95 %"] == pytest.approx(12.706, rel=1e-3)  # t of one degree of freedom
    assert composed["difference"] == pytest.approx(10)
    assert composed["difference ± 95 %"] == pytest.approx(0, abs=1e-9)
    assert (plain["ImageNet-1k, 300 epochs, paper"], composed["ImageNet-1k, 300 epochs, paper"]) == (79.8, 80.1)
    assert rows["DCViT on digits, equal time"]["steps"] == 50
    assert rows["DCViT on digits, equal time"]["difference"] == pytest.approx(-5)
    assert "more accurate than ViT on digits at equal steps: holds (+10.00" in table.notes[1]
    assert "more accurate than ViT on digits at equal time: does not hold (-5.00" in table.notes[1]
    assert "more accurate than ViT on scenes at equal time: undecided" in table.notes[1]


def test_an_incomplete_seed_is_an_error(train, tmp_path):
    table8.train(tmp_path, [0], train, 80)
    with pytest.raises(ConfigError, match="the runs of seed 1 are not complete"):
        table8.table8(tmp_path, [0, 1], 80)
