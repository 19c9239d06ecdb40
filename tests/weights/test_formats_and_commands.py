"""A converted model has the results of its run in every command."""

import json
from pathlib import Path

import pytest
from explorer_pages import facts_of
from trained_workdirs import DIGITS, TEXT

from dcvit import cli, convert, evaluate, explore, generate, predict

SEVEN = Path(__file__).parents[1] / "data" / "seven.png"
IMAGES = ["--config", "vit_digits", *(f"--config.{key}={DIGITS[key]}" for key in DIGITS if key.startswith("model."))]
TEXTS = ["--config", "lm_stdlib", *(f"--config.{key}={value}" for key, value in TEXT.items())]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("library_promotion")]


@pytest.fixture
def call(capsys):
    """Run a command and return what it prints."""

    def call(main, *words):
        capsys.readouterr()
        assert cli.run(main, [str(word) for word in words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def metrics(printed):
    """The row of an evaluation without the step, which weights do not have, and its speed."""
    (row,) = json.loads(printed)
    return {name: value for name, value in row.items() if name != "step" and not name.endswith("per_second")}


def test_a_converted_classifier_has_the_results_of_its_run(digits_workdir, call, tmp_path):
    """tests/weights/test_conversion.py compares the parameters in every format."""
    found = []
    for place in (digits_workdir, tmp_path / "weights"):
        if place != digits_workdir:
            call(convert.main, digits_workdir, place, "--to", "safetensors")
        page = tmp_path / f"{place.name}.html"
        call(explore.main, "--workdir", place, SEVEN, "--no_ablations", "--out", page)
        found.append((
            metrics(call(evaluate.main, *IMAGES, "--checkpoint", place, "--format", "json")),
            call(predict.main, "--workdir", place, SEVEN, "--format", "csv"),
            facts_of(page.read_text())["samples"][0]["predictions"],
        ))  # fmt: skip
    assert found[0] == found[1]


def test_a_converted_language_model_has_the_results_of_its_run(lm_workdir, call, tmp_path):
    call(convert.main, lm_workdir, tmp_path / "weights", "--to", "safetensors")
    found = []
    for place in (lm_workdir, tmp_path / "weights"):
        model = [*TEXTS, "--config.model.end_of_text=256", "--checkpoint", place]
        row = metrics(call(evaluate.main, *model, "--format", "json"))
        found.append((row, call(generate.main, *model, "--prompt", "def", "--tokens", "5")))
    assert found[0] == found[1]
