"""Every format and layout of a trained model has the results of its run."""

import functools
import json
from pathlib import Path

import pytest
from explorer_pages import facts_of
from trained_workdirs import DIGITS, TEXT

from dcvit import cli, convert, evaluate, explore, generate, predict
from dcvit.weights.tensors import open_npz

SEVEN = Path(__file__).parents[1] / "data" / "seven.png"
FORMATS = {"safetensors": "a.safetensors", "hf": "hf", "npz": "a.npz", "dcvit": "converted"}
RUNS = {
    "images": ("vit_digits", {key: DIGITS[key] for key in DIGITS if key.startswith("model.")}),
    "texts": ("lm_stdlib", {**TEXT, "model.end_of_text": 256}),
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("library_promotion")]


@pytest.fixture(scope="module")
def place_of(digits_workdir, lm_workdir, tmp_path_factory):
    """Return a function of kind and format: the same model as a run, its last checkpoint, or a conversion."""
    root = tmp_path_factory.mktemp("formats")

    @functools.cache
    def place(kind, to):
        workdir = {"images": digits_workdir, "texts": lm_workdir}[kind]
        if to == "run":
            return workdir
        if to == "checkpoint":
            return max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
        folder = root / kind / FORMATS[to]
        assert cli.run(convert.main, [str(workdir), str(folder), "--to", to]) == 0
        return folder

    return place


@pytest.fixture
def call(capsys):
    """Run a command and return what it prints."""

    def call(main, *words):
        capsys.readouterr()
        assert cli.run(main, [str(word) for word in words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def with_config(kind, place):
    """The options that name a checkpoint and its config."""
    name, overrides = RUNS[kind]
    words = [f"--config.{key}={value}" for key, value in overrides.items()]
    return ["--config", name, "--checkpoint", place, *words]


def evaluated(kind, call, place):
    (row,) = json.loads(call(evaluate.main, *with_config(kind, place), "--format", "json"))
    return {name: value for name, value in row.items() if name != "step" and not name.endswith("per_second")}


@pytest.mark.parametrize("to", ["safetensors", *(pytest.param(to, marks=pytest.mark.exhaustive)
                                                 for to in ("checkpoint", "hf", "npz", "dcvit"))])  # fmt: skip
@pytest.mark.parametrize("kind", RUNS)
def test_every_format_has_the_metrics_of_the_run(kind, to, place_of, call):
    assert evaluated(kind, call, place_of(kind, to)) == evaluated(kind, call, place_of(kind, "run"))


def test_commands_give_the_results_of_the_run_for_a_converted_model(place_of, call, tmp_path):
    found = []
    for to in ("run", "safetensors"):
        image, text, out = place_of("images", to), place_of("texts", to), tmp_path / to
        call(explore.main, "--workdir", image, SEVEN, "--out", out.with_suffix(".html"))
        call(convert.main, image, out, "--to", "npz")
        arrays = {
            name: x.read().tobytes() for name, x in open_npz(out / "params.npz").items() if name.startswith("params/")
        }
        found.append((
            call(predict.main, "--workdir", image, SEVEN, "--format", "csv"), arrays,
            facts_of(out.with_suffix(".html").read_text())["samples"][0]["predictions"],
            call(generate.main, *with_config("texts", text), "--prompt", "def", "--tokens", "5"),
        ))  # fmt: skip
    assert found[0] == found[1]
