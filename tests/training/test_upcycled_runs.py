"""configs/upcycle.py: runs that start from a plain model and compose its attention."""

import json
import re
import shlex

import pytest
from trained_workdirs import load_params

from dcvit import cli, train
from dcvit.config import load as configs
from dcvit.errors import CheckpointError, ConfigError
from dcvit.hub.kinds import make_model
from dcvit.models.upcycling import COMPOSITION
from dcvit.parallel.trees import by_name
from dcvit.runs import metrics
from dcvit.training.model import make_loader

pytestmark = pytest.mark.usefixtures("library_promotion")


def upcycle(init, workdir, arguments="", *overrides):
    """Train as the command does; return the exit status."""
    words = [f"--config.{word}" for word in ("ema_decay=0.0", "total_steps=1", *overrides)]
    return cli.run(train.main, ["--config", f"upcycle:init={init}{arguments}", "--workdir", str(workdir), *words])


@pytest.mark.weekly
def test_run_of_images_starts_with_the_metrics_of_the_plain_run_and_new_compositions(digits_workdir, tmp_path):
    run = tmp_path / "run"
    assert upcycle(digits_workdir, run, "", "model.compose=pre", "model.branches=q", "model.rank=1") == 0
    before, after = (metrics.read(workdir / "metrics.jsonl") for workdir in (digits_workdir, run))
    assert after[0]["step"] == 0
    assert after[0]["test/loss"] == pytest.approx(before[-1]["test/loss"], abs=1e-6)
    assert after[0]["num_params"] > before[0]["num_params"]
    old, new = (by_name(load_params(workdir)).keys() for workdir in (digits_workdir, run))
    assert new - old == {name for name in new if COMPOSITION.fullmatch(name)}


def test_plain_run_in_a_composed_model_is_one_line_that_names_the_option(digits_workdir, tmp_path, capsys):
    assert upcycle(digits_workdir, tmp_path / "run", "", "model_load.upcycle=False") == 2
    err = capsys.readouterr().err
    assert re.search(r"only in the model.*--config\.model_load\.upcycle=True\n$", err)
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def runs(tmp_path):
    """Write the config of a run, with the folder of a checkpoint, and return the workdir."""

    def write(spec, *overrides):
        workdir = tmp_path / "plain"
        (workdir / "checkpoints" / "6").mkdir(parents=True)
        (workdir / "config.json").write_text(configs.load(spec, overrides).to_json())
        return workdir

    return write


def test_model_data_and_recipe_are_those_of_the_run(runs):
    workdir = runs("vit_digits:attention=mha", "seed=4294967295", "model.dropout=0.1")
    old = json.loads((workdir / "config.json").read_text())
    for init in (workdir, f"{workdir}/", workdir / "checkpoints" / "6"):
        new = configs.load(f"upcycle:init={init}", ["model.rank=3", "model.static=True"])
        assert new.model.to_dict().items() >= (old["model"] | {"compose": "both", "rank": 3, "static": True}).items()
        assert (new.model_init, new.model_load.to_dict(), new.seed) == (str(init), {"upcycle": True}, 0)
        changed = {key for key in old if json.loads(new.to_json())[key] != old[key]}
        assert changed == {"model", "model_init", "model_load", "seed"}
    short = configs.load(f"upcycle:init={workdir},attention=mha", ["total_steps=7"])
    assert (short.total_steps, short.get("total_epochs")) == (7, None)
    assert (short.model.compose, short.model_load.upcycle) == (None, False)


@pytest.mark.parametrize(("argument", "tokenizer"), [(",tokenizer=train", "{}/tokenizer.json"), ("", None)])
def test_tokenizer_that_the_run_trained_is_used_again(runs, argument, tokenizer):
    workdir = runs(f"lm_text:data_dir=books{argument}")
    for init in (workdir, workdir / "checkpoints" / "6"):
        new = configs.load(f"upcycle:init={init}")
        for data in (new.input.data, new.evals.validation.data):
            assert data.tokenizer == (tokenizer and tokenizer.format(workdir))


PILE = "lm_pile:preset={}-405M,runlocal=true"


@pytest.mark.parametrize(
    ("family", "expected"), [("DCFormer++", {"qk_norm", "window_pattern"}), ("Transformer++", set())]
)
def test_preset_with_another_function_is_refused_with_the_options_that_keep_it(runs, family, expected):
    """The paper's composed models also have local layers and a QK-norm."""
    workdir = runs(PILE.format("Transformer++"))
    words = [f"model_init={workdir}", "model_load.upcycle=True", "model.compose=both"]
    message = loading_error(configs.load(PILE.format(family), words))
    assert "\n" not in message
    assert ("upcycling preserves the function of" in message) == bool(expected)
    options = [word.removeprefix("--config.") for word in shlex.split(message) if word.startswith("--config.model.")]
    assert {option.partition("=")[0].removeprefix("model.") for option in options} == expected
    assert "SHA256SUMS is missing" in loading_error(configs.load(PILE.format(family), [*words, *options]))


def loading_error(config):
    """Return the message about the checkpoint of a config, which has no parameters."""
    loader = make_loader(config, make_model(config), {})
    with pytest.raises((ConfigError, CheckpointError)) as error:
        loader({})
    return str(error.value)


def test_quoted_word_is_a_text():
    """As messages write it, because none without quotes means None, whether the key exists or not."""
    config = configs.load(PILE.format("Transformer++"), ["model.rank=2", "model.window_pattern='none'"])
    assert config.model.window_pattern == "none"
