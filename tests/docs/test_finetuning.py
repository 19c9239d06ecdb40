"""The commands of the page about fine-tuning run word for word, on generated images."""

from pathlib import Path

import numpy as np
import pytest
from markdown_pages import ROOT, blocks, commands, run_commands
from PIL import Image
from trained_workdirs import load_params

import dcvit
from dcvit.parallel.trees import by_name

PAGE = ROOT / "docs/finetuning.md"


def pets(folder):
    """Write two classes of small images, which differ in their brighter half."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 10)):
        for label, half in (("cat", slice(0, 6)), ("dog", slice(6, 12))):
            (folder / split / label).mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 160, (12, 12, 3), dtype=np.uint8)
                image[:, half] += 60
                Image.fromarray(image).save(folder / split / label / f"{i}.png")


@pytest.mark.weekly
def test_the_commands_run_as_written(tmp_path, monkeypatch, library_promotion):
    pets(tmp_path / "pets")
    (block,) = blocks(PAGE, "bash", "<!-- run by tests/docs/test_finetuning.py -->")
    run_commands(commands(block), tmp_path, monkeypatch)
    assert "Calibration error" in Path("runs/average.html").read_text()
    a, b, mean = (by_name(load_params(Path("runs", name))) for name in ("a", "b", "average"))
    for name, value in mean.items():
        np.testing.assert_allclose(value, (np.asarray(a[name], np.float64) + b[name]) / 2, rtol=1e-6, atol=1e-9)
    start = by_name(dcvit.load("digits").params)
    first = [name for name in start if name.startswith(("embedding/", "Transformer/encoderblock_0/"))]
    for name in first:
        np.testing.assert_allclose(a[name], start[name], rtol=1e-5, atol=1e-7)  # frozen; an average of equal numbers
    assert any((b[name] != start[name]).any() for name in first)
