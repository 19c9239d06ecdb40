"""The comparison of compositions with grouped queries: its models, its runs, and the pairs that it compares."""

import json
from pathlib import Path

import pytest

from dcvit.config.load import load
from dcvit.reproduction import arms, key_heads, step_times
from dcvit.training.model import make_model

GAIN = {"plain": 0.0, "DCFlash": 0.2, "query-wise": 0.2, "complete": 0.3}


def all_arms():
    return [(n, name) for n in key_heads.KEY_HEADS for name in key_heads.fields_of(n)]


@pytest.mark.parametrize(("n", "name"), all_arms())
def test_arms_have_the_composition_that_they_are_named_for(n, name):
    model = arms.model_of(
        {**arms.MODEL, **key_heads.fields_of(n)[name], "compose": None if name == "plain" else "both"}
    )
    assert (model.num_heads, model.num_key_heads) == (8, n)
    folds = name != "plain" and model.branches == "q" and model.groups % n == 0
    assert folds == (name == "DCFlash" or (name, n) == ("query-wise", 1))
    if n == key_heads.IMAGE_KEY_HEADS:
        vit = make_model(load(*key_heads.image_run(name, 600, 0)))
        fields = ("num_heads", "num_key_heads", "compose", "branches", "groups")
        assert [getattr(vit, field) for field in fields] == [getattr(model, field) for field in fields]


@pytest.fixture
def train(monkeypatch):
    """A stand-in for `dcvit train` without measured times; composed models take twice the time of plain ones."""

    def times(runs, folder):
        ms = {name: 10.0 if name.endswith("plain") else 20.0 for name in runs}
        return step_times.StepTimes(ms, "a machine")

    monkeypatch.setattr(step_times, "step_times", times)

    def run(words):
        workdir = Path(words[3])
        config = load(words[1], [word.removeprefix("--config.") for word in words[4:]])
        kind = workdir.parent.name.removeprefix("K=").split("_", 1)[-1]
        gain = GAIN[kind.removesuffix("=time")] / (2 if kind.endswith("=time") else 1)
        metric = key_heads.IMAGE_METRIC if config.model_name == "vit" else arms.METRIC
        value = 0.5 + gain if config.model_name == "vit" else 3 - gain * config.model.num_key_heads
        workdir.mkdir(parents=True)
        (workdir / "config.json").write_text(config.to_json())
        rows = [{"step": 0, "num_params": 7}, {"step": config.total_steps, metric: value + 0.01 * config.seed}]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    return run


@pytest.mark.exhaustive
def test_rows_are_compared_with_the_plain_model_of_as_many_key_heads(train, tmp_path):
    assert key_heads.train(tmp_path, [0, 1], train, 40) == 0
    table = key_heads.table(tmp_path, [0, 1], 40)
    assert [row["config"] for row in table.rows] == [f"K={n} {name}" for n, name in all_arms()]
    for row, (n, name) in zip(table.rows, all_arms(), strict=True):
        assert row["difference"] == pytest.approx(-GAIN[name] * n)
        assert row["at equal time"] == pytest.approx(3.005 - GAIN[name] * n / (1 if name == "plain" else 2))
        assert row["steps at equal time"] == (40 if name == "plain" else 20)
        cache = 2 * n * 8 * 2 + (160 if name == "complete" else 0)  # keys and values, and key-wise weights, two layers
        assert row["cache per token"] == cache
        assert row["ViT difference"] == (pytest.approx(100 * GAIN[name]) if n == key_heads.IMAGE_KEY_HEADS else None)
    statements = table.notes[-1]
    assert "with 2 of 8 key heads, composition inside key heads improves plain attention: holds (-0.4000" in statements
    assert statements.count("\n- ") == 9
