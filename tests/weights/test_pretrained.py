"""Models of the package: names, cards, and the commands that use them."""

import json
import platform

import numpy as np
import pretrain
import pytest
from markdown_pages import ROOT
from marks import exhaustive

import dcvit
from dcvit import cli, generate, predict
from dcvit.errors import CheckpointError
from dcvit.hub import pretrained
from dcvit.hub.source import init_config
from dcvit.runs import checksums
from dcvit.training import setup
from dcvit.training.evaluation import open_evaluators

NAMES = ("digits", "tasks", "text")
FOLDER = ROOT / "dcvit" / "pretrained"
SEVEN = str(ROOT / "tests" / "data" / "seven.png")
SENTENCE = "wolf . wolf . cello . odd the"


def figures(name):
    return json.loads((FOLDER / name / pretrain.FIGURES).read_text())


def test_the_package_has_the_models_that_the_script_makes():
    assert tuple(pretrained.names()) == NAMES == tuple(sorted(pretrain.CONFIGS))
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 6_000_000
    for name in NAMES:
        assert checksums.problems(FOLDER / name, name=checksums.WEIGHTS) == []
        assert checksums.files(FOLDER / name, checksums.WEIGHTS) == ["config.json", "model.safetensors", "run.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", exhaustive("tasks"), pytest.param("text", marks=pytest.mark.weekly)])
def test_the_weights_have_the_metrics_of_their_card(name):
    """Exactly the data of the card; the text is that of the Python that runs, so another one has other figures."""
    card = figures(name)
    same_text = name != "text" or f"Python {platform.python_version()}," in card["software"]
    found = pretrain.evaluations(FOLDER / name)
    assert found.keys() == card["evaluations"].keys()
    for evaluator, expected in card["evaluations"].items():
        assert found[evaluator].keys() == expected.keys()
        for key, value in expected.items():
            tolerance = {"top1": 0.003, "accuracy": 0.001}.get(key, 1e-3) if same_text else 0.25
            assert found[evaluator][key] == pytest.approx(value, abs=tolerance), key


@pytest.mark.slow
def test_names_load_with_classes_tokenizers_and_evaluators(tmp_path, monkeypatch, library_promotion):
    monkeypatch.chdir(tmp_path)
    digits, tasks, text = map(dcvit.load, NAMES)
    assert digits.predict(SEVEN)[0][0].label == "7"
    assert tasks.generate(SENTENCE, 1, temperature=0).strip() == "cello"
    assert text.tokenizer.encode("é") == list("é".encode())
    assert [*open_evaluators(digits.opened).evaluators] == ["test"]
    assert digits.source == "digits"
    initial = setup.load_setup("vit_digits", ["model_init=digits"]).model
    kernel = initial.load_initial(initial.shapes)["head"]["kernel"]
    np.testing.assert_array_equal(kernel, digits.params["head"]["kernel"])
    assert init_config("digits")["model"]["patch_size"] == [2, 2]


def test_an_unknown_name_lists_the_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no file digit; the models of the package are digits, tasks, text"):
        dcvit.load("digit")
    assert cli.run(predict.main, ["--model", "digit", SEVEN]) == 2
    assert capsys.readouterr().err == "error: no workdir digit; the models of the package are digits, tasks, text\n"


def test_a_local_path_of_the_same_name_is_opened_with_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    assert cli.run(generate.main, ["--model", "text", "--prompt", "a"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "text: the local path is opened, not the model of the package with this name"
    assert error.startswith("error: text has no weights")
