"""The command plot on the metrics of finished and barely started runs."""

import json
from pathlib import Path

import pytest

from dcvit import cli, plot
from dcvit.runs import curves


def write_metrics(workdir, rows):
    workdir.mkdir(exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("workdirs", "labels"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/vit/seed0", "runs/dcvit/seed0", "runs/vit/seed1"], ["vit/seed0", "dcvit/seed0", "vit/seed1"]),
        (["seed0", "old/seed0"], ["seed0", "old/seed0"]),
        (["runs/a", "runs/a"], ["a", "a"]),
    ],
)
def test_labels_tell_runs_apart(workdirs, labels):
    assert curves.labels([Path(workdir) for workdir in workdirs]) == labels


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_names_of_runs_are_drawn_literally(tmp_path, suffix, capsys):
    """A pair of $ would be a formula, and a font may lack characters."""
    names = ["a$b_{$", "line\nfeed", "\x1b[31m", "\u202egnp", "猫", ":cat:"]
    for name in names:
        write_metrics(tmp_path / name, [{"step": 0, "loss": 1.0, "$v_{$/top1": 0.5}])
    out = tmp_path / f"curves\n.{suffix}"
    assert cli.run(plot.main, [*(str(tmp_path / name) for name in names), "--out", str(out)]) == 0
    assert out.read_bytes().startswith((b"\x89PNG", b"<?xml"))
    assert capsys.readouterr() == (f"curves: {tmp_path}/curves\\n.{suffix}\n", "")


def test_curves_are_drawn_for_runs_with_few_metrics(tmp_path):
    few = {"step": 0, "num_params": 3}, {"step": 0, "loss": 1.0}, {"step": 0, "loss": None, "val/loss": None}
    runs = [*([row] for row in few), [{"step": s, "loss": 2.0 - s, "val/top1": 0.1 * s} for s in range(3)]]
    for i, rows in enumerate(runs):
        write_metrics(tmp_path / f"_{i}", rows)
    for names in (*(f"_{i}" for i in range(len(few))), "_0 _3"):
        out = tmp_path / "curves.svg"
        assert cli.run(plot.main, [*(str(tmp_path / name) for name in names.split()), "--out", str(out)]) == 0
        assert out.read_text().count("</svg>") == 1
