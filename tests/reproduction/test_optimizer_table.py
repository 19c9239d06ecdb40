"""AdamW and Muon: the words of a run set them, and differences are those of paired seeds with one learning rate."""

import csv

import pytest
from fake_training import FakeTraining, set_times
from markdown_pages import ROOT

from dcvit.config.load import load
from dcvit.reproduction import optimizers
from dcvit.reproduction.optimizers import COMPOSE, OPTIMIZERS
from dcvit.reproduction.seeded import train_all

LOSS = {"AdamW": 3.0, "Muon": 2.5, "plain": 0.0, "composed": -0.2}


def test_runs_differ_in_optimizer_attention_and_learning_rate_alone(tmp_path):
    seen = []
    for (optimizer, attention, lr), run in optimizers.runs(tmp_path, 7).items():
        config = load(run.spec, run.words(3)).to_dict()
        name, arguments = config.pop("optax_name"), config.pop("optax")
        assert (name, arguments) == {
            "AdamW": ("scale_by_adam", {"b1": 0.9, "b2": 0.95}), "Muon": ("muon", {})
        }[optimizer]  # fmt: skip
        assert config["model"].pop("compose") == {"plain": None, "composed": "both"}[attention]
        assert config.pop("lr") == lr
        assert (config["total_steps"], config["seed"]) == (7, 3)
        seen.append(config)
    assert len(seen) == 16
    assert all(config == seen[0] for config in seen)


def test_the_table_has_differences_of_paired_seeds(tmp_path, monkeypatch):
    set_times(monkeypatch, len)

    def metrics(arm, config):
        optimizer, attention, lr = arm.split("/")[1].split("_")
        return {"validation/bits_per_byte": LOSS[optimizer] + LOSS[attention] + 10 * float(lr) + config.seed}

    assert train_all(optimizers.plan(tmp_path, 7), [0, 1], FakeTraining(metrics)) == 0
    rows = {row["run"]: row for row in optimizers.table(tmp_path, [0, 1], 7).rows}
    first, last = rows["AdamW plain 0.0015"], rows["Muon composed 0.006"]
    assert (first["to plain"], first["to AdamW"], first["step ms"]) == (None, None, len("AdamW plain"))
    assert last["bits per byte"] == pytest.approx(2.5 - 0.2 + 0.06 + 0.5)
    assert (last["to plain"], last["to AdamW"]) == (pytest.approx(-0.2), pytest.approx(-0.5))
    assert last["to plain ± 95 %"] == pytest.approx(0, abs=1e-9)


def test_the_page_has_the_results():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    with (ROOT / "docs" / "reproduction" / "optimizers.csv").open() as file:
        rows = {row["run"]: (float(row["bits per byte"]), float(row["± 95 %"])) for row in csv.DictReader(file)}
    for lr in optimizers.RATES:
        names = [f"{optimizer} {attention} {lr:g}" for optimizer in OPTIMIZERS for attention in COMPOSE]
        cells = [f"{mean:.3f} ± {interval:.3f}" for mean, interval in map(rows.get, names)]
        assert f"| {lr:g} | {' | '.join(cells)} |" in page
