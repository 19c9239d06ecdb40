"""Every command opens a trained model in every format and layout, with the results of its run."""

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


def explored(call, place, folder):
    call(explore.main, "--workdir", place, SEVEN, "--out", folder / "page.html")
    return facts_of((folder / "page.html").read_text())["samples"][0]["predictions"]


def converted(call, place, folder):
    call(convert.main, place, folder / "again", "--to", "npz")
    (file,) = (folder / "again").glob("*.npz")
    return {name: x.read().tobytes() for name, x in open_npz(file).items() if name.startswith("params/")}


TEXT_WORDS = ("--prompt", "def", "--tokens", "5")
COMMANDS = {
    "images": {
        "predict": lambda call, place, _: call(predict.main, "--workdir", place, SEVEN, "--format", "csv"),
        "evaluate": lambda call, place, _: evaluated("images", call, place),
        "explore": explored,
        "convert": converted,
    },
    "texts": {
        "generate": lambda call, place, _: call(generate.main, *with_config("texts", place), *TEXT_WORDS),
        "evaluate": lambda call, place, _: evaluated("texts", call, place),
    },
}
CELLS = [
    pytest.param(kind, to, command, marks=() if to == "safetensors" else pytest.mark.exhaustive)
    for kind, commands in COMMANDS.items()
    for command in commands
    for to in ("checkpoint", *FORMATS)
    if to == "safetensors" or command in ("convert", "evaluate")
]


@pytest.fixture(scope="module")
def of_run():
    """The result of each command for the run, by kind and command."""
    return {}


@pytest.mark.parametrize(("kind", "to", "command"), CELLS)
def test_a_command_gives_the_results_of_the_run_for_every_format(kind, to, command, place_of, call, of_run, tmp_path):
    def result(place):
        (folder := tmp_path / place).mkdir()
        return COMMANDS[kind][command](call, place_of(kind, place), folder)

    if (kind, command) not in of_run:
        of_run[kind, command] = result("run")
    assert result(to) == of_run[kind, command]
