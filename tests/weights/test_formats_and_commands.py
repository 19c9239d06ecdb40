"""Every command opens a trained model in every format and layout, with the results of its run."""

import json
from pathlib import Path

import flax.traverse_util
import numpy as np
import pytest
from trained_workdirs import DIGITS, TEXT

from dcvit import cli, convert, evaluate, explore, generate, predict
from dcvit.training import setup
from dcvit.weights.npz import read

SEVEN = Path(__file__).parents[1] / "data" / "seven.png"
FORMATS = {"safetensors": "a.safetensors", "hf": "hf", "npz": "a.npz", "bv": "a.bv", "dcvit": "converted"}
RUNS = {
    "images": ("vit_digits", {key: DIGITS[key] for key in DIGITS if key.startswith("model.")}),
    "texts": ("lm_stdlib", {**TEXT, "model.end_of_text": 256}),
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("library_promotion")]


@pytest.fixture(scope="module")
def places(digits_workdir, lm_workdir, tmp_path_factory):
    """By kind and format, the same model: the run, its last checkpoint, and its conversions."""
    found = {}
    for kind, workdir in (("images", digits_workdir), ("texts", lm_workdir)):
        folder = tmp_path_factory.mktemp(kind)
        last = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
        found[kind] = {"run": workdir, "checkpoint": last}
        for to, name in FORMATS.items():
            assert cli.run(convert.main, [str(workdir), str(folder / name), "--to", to]) == 0
            found[kind][to] = folder / name
    return found


@pytest.fixture
def call(capsys):
    """Run a command and return what it prints."""

    def call(main, *words):
        capsys.readouterr()
        assert cli.run(main, [str(word) for word in words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def with_config(kind, place, **more):
    """The options that name a checkpoint and its config."""
    name, overrides = RUNS[kind]
    words = [f"--config.{key}={value}" for key, value in {**overrides, **more}.items()]
    return ["--config", name, "--checkpoint", place, *words]


def opened_by_predict(call, place, folder):
    return call(predict.main, "--workdir", place, SEVEN, "--format", "csv")


def opened_by_predict_with_a_config(call, place, folder):
    return call(predict.main, *with_config("images", place), SEVEN, "--format", "csv")


def opened_by_predict_as_a_scan(call, place, folder):
    return call(predict.main, *with_config("images", place, **{"model.scan": True}), SEVEN, "--format", "csv")


def opened_by_predict_at_another_size(call, place, folder):
    return call(predict.main, *with_config("images", place), SEVEN, "--image-size", "12x16", "--format", "csv")


def opened_by_evaluate_at_another_size(call, place, folder):
    words = (*with_config("images", place), "--image-size", "12x16", "--format", "json")
    (row,) = json.loads(call(evaluate.main, *words))
    return {name: row[name] for name in ("top1", "loss", "n", "parameters", "image_size")}


def opened_by_evaluate(call, place, folder):
    (row,) = json.loads(call(evaluate.main, *with_config("images", place), "--format", "json"))
    return {name: row[name] for name in ("top1", "loss", "n", "parameters")}


def opened_by_explore(call, place, folder):
    call(explore.main, "--workdir", place, SEVEN, "--out", folder / "page.html")
    page = (folder / "page.html").read_text()
    facts = json.loads(page.split('id="facts-data">')[1].split("</script>")[0])
    return facts["samples"][0]["predictions"]


def opened_by_convert(call, place, folder):
    call(convert.main, place, folder / "again", "--to", "npz")
    (file,) = (folder / "again").glob("*.npz")
    return {name: x.tobytes() for name, x in read(file).items()}


def opened_by_model_init(call, place, folder):
    name, overrides = RUNS["images"]
    made = setup.load_setup(name, [f"{k}={v}" for k, v in {**overrides, "model_init": place}.items()])
    params = made.model.load_initial(made.model.shapes)
    return {name: np.asarray(x).tobytes() for name, x in flax.traverse_util.flatten_dict(params, sep="/").items()}


def opened_by_generate(call, place, folder):
    return call(generate.main, "--workdir", place, "--prompt", "def", "--tokens", "5")


def opened_by_generate_with_a_config(call, place, folder):
    return call(generate.main, *with_config("texts", place), "--prompt", "def", "--tokens", "5")


def opened_by_evaluate_of_texts(call, place, folder):
    (row,) = json.loads(call(evaluate.main, *with_config("texts", place), "--format", "json"))
    return {name: row[name] for name in ("bits_per_byte", "parameters")}


COMMANDS = {
    "images": (
        opened_by_predict, opened_by_predict_with_a_config, opened_by_predict_as_a_scan, opened_by_evaluate,
        opened_by_predict_at_another_size, opened_by_evaluate_at_another_size,
        opened_by_explore, opened_by_convert, opened_by_model_init,
    ),
    "texts": (opened_by_generate, opened_by_generate_with_a_config, opened_by_evaluate_of_texts),
}  # fmt: skip
CELLS = [
    pytest.param(kind, to, command, marks=() if to == "safetensors" else pytest.mark.exhaustive)
    for kind, commands in COMMANDS.items()
    for command in commands
    for to in ("checkpoint", *FORMATS)
    if command is not opened_by_generate or to in ("checkpoint", "dcvit")  # bytes have no tokenizer.json
]


@pytest.mark.parametrize(("kind", "to", "command"), CELLS)
def test_a_command_gives_the_results_of_the_run_for_every_format(kind, to, command, places, call, tmp_path):
    found = []
    for number, place in enumerate((places[kind]["run"], places[kind][to])):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(command(call, place, folder))
    assert found[0] == found[1]
