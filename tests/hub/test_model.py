"""Trained models opened from a workdir or a checkpoint: evaluation, context and tokenizer; exact perplexity."""

import functools
import json
import math
import subprocess
import sys

import conversion_models
import corpora
import numpy as np
import pytest
from marks import exhaustive
from sources import evaluation_data
from trained_workdirs import TEXT
from training_runs import nats, perturbed_params, small_lm_setup

import dcvit
import input_pipeline
from dcvit import cli, errors, evaluate
from dcvit.config import load as configs
from dcvit.config import values
from dcvit.evaluators.perplexity import Evaluator, Options
from dcvit.hub.kinds import make_model
from dcvit.hub.open import Opened, open_model
from dcvit.hub.source import find
from dcvit.hub.tokenizers import open_tokenizer_of
from dcvit.parallel import sharding
from dcvit.runs import metrics
from dcvit.runs.workdir import Thresholds, write_thresholds
from dcvit.training.evaluation import predictor

pytestmark = pytest.mark.usefixtures("library_promotion")


@functools.cache
def small_model():
    """Return a small language model and parameters without zero layers."""
    setup = small_lm_setup()
    return setup.model.module, perturbed_params(setup)


def perplexity_of(net, options):
    data = evaluation_data(input_pipeline.open_source(**options.data), sharding.data_mesh())
    return Evaluator(predictor(net), data, options)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [7, exhaustive(16)])
def test_perplexity_is_exact_for_every_batch_size(batch_size):
    net, params = small_model()
    data = {"kind": "stdlib", "split": "validation", "context": 24, "limit": 21}
    options = Options(data=data, batch_size=batch_size, loss_chunk=10)
    evaluator = perplexity_of(net, options)
    rows = [evaluator.source[i] for i in range(21)]
    tokens, counted = (np.stack([row[key] for row in rows]) for key in ("tokens", "is_target"))
    tokens[5, 11] = tokens[7, 3] = 256  # end documents
    evaluator.source.source.tokens = tokens.reshape(-1).astype(np.uint16)
    total, targets = nats(net, params, tokens)[counted[:, 1:]].sum(), tokens[:, 1:][counted[:, 1:]]
    ends = int((targets == 256).sum())
    got = evaluator.run(params)
    assert (got["tokens"], got["bytes"], got["documents"]) == (21 * 24, 21 * 24 - ends, ends)
    assert got["loss"] == pytest.approx(total / (21 * 24), rel=1e-6)
    assert got["perplexity"] == pytest.approx(math.exp(total / (21 * 24)), rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(total / math.log(2) / (21 * 24 - ends), rel=1e-6)
    assert got["nats_per_document"] == pytest.approx(total / ends, rel=1e-6)
    (row,) = evaluator.rows("validation", got, net)
    assert row.keys() - {"evaluation"} == set(evaluator.columns)


@pytest.mark.slow
def test_only_the_target_span_counts(tmp_path):
    """The loss on the target span only, as in the paper's evaluation on Flan."""
    lines = [{"inputs": "1+1=", "targets": "2"}, {"inputs": "name: ", "targets": "Ada Lovelace"}]
    (tmp_path / "flan.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    net, params = small_model()
    options = Options(data={"kind": "spans", "path": str(tmp_path / "flan.jsonl"), "context": 24})
    evaluator = perplexity_of(net, options)
    total = 0.0
    for line in lines:
        tokens = np.array([*(line["inputs"] + line["targets"]).encode(), 256])[None]
        total += nats(net, params, tokens)[0, len(line["inputs"]) - 1 :].sum()
    got = evaluator.run(params)
    assert (got["tokens"], got["bytes"], got["documents"]) == (15, 13, 2)
    assert got["loss"] == pytest.approx(total / 15, rel=1e-5)


@pytest.mark.exhaustive
def test_evaluation_of_a_workdir_repeats_that_of_training(lm_workdir, tmp_path, capsys):
    config = json.loads((lm_workdir / "config.json").read_text())
    assert (config["vocab_size"], config["model"]["end_of_text"], config["model"]["context"]) == (257, 256, 24)
    assert cli.run(evaluate.main, ["--workdir", str(lm_workdir), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    first, *_, last = metrics.read(lm_workdir / "metrics.jsonl")
    assert last["validation/bits_per_byte"] < first["validation/bits_per_byte"] <= 8.1
    assert row["loss"] == pytest.approx(last["validation/loss"], rel=1e-6)
    assert (row["tokens"], row["step"]) == (21 * 24, 6)
    assert [*row][:7] == ["evaluation", "model", "step", "parameters", "loss", "perplexity", "bits_per_byte"]
    # another config takes the properties of the text from the run, also from that of a checkpoint
    words = [f"--config.{key}={value}" for key, value in {**TEXT, "vocab_size": "none"}.items()]
    argv = ["--config", "lm_stdlib", "--format", "json", *words]
    assert cli.run(evaluate.main, [*argv, "--workdir", str(lm_workdir)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == row["loss"]
    assert cli.run(evaluate.main, [*argv, "--checkpoint", str(lm_workdir)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == row["loss"]
    # without the run they must be given
    np.savez(tmp_path / "alone.npz", **{path: tensor.read() for path, tensor in find(lm_workdir).params.items()})
    without = [*argv, "--checkpoint", str(tmp_path / "alone.npz"), "--config.vocab_size=257"]
    assert cli.run(evaluate.main, without) == 2
    assert "config.model.end_of_text is not known" in capsys.readouterr().err
    assert cli.run(evaluate.main, [*without, "--config.model.end_of_text=256"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == row["loss"]


@pytest.mark.slow
def test_a_loaded_image_model_imports_nothing_for_text_data_or_evaluation():
    run = [sys.executable, "-c", "import sys, dcvit; dcvit.load('digits'); print(*sys.modules)"]
    names = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    names = [name for name in names if name.split(".")[0] in ("dcvit", "input_pipeline")]
    unneeded = "dcvit.evaluators", "dcvit.training", "dcvit.inference.texts", "dcvit.config.load", "input_pipeline.text"
    assert [
        name for name in names if name.startswith((*unneeded, "dcvit.hub.tokenizers", "dcvit.weights.export"))
    ] == []
    assert len(names) <= 99


def test_thresholds_beside_weights_decide_what_is_predicted(tmp_path):
    weights = conversion_models.image_model((8, 8, 1), compose=None, depth=1)[2]
    several = weights.description._replace(multilabel=True, class_names=tuple("abcdefghij"), pp="")
    folder = conversion_models.write(weights._replace(description=several), tmp_path / "weights")
    chosen = Thresholds((0.0, *[1.0] * 9), "val", None)
    write_thresholds(folder, chosen, several.class_names)
    model = dcvit.load(folder)
    assert model.thresholds == chosen.values
    (found,) = model.predict(np.zeros((8, 8, 1), np.float32))
    assert [prediction.label for prediction in found] == ["a"]


def test_weights_that_state_another_model_than_the_config_are_refused(tmp_path, capsys, caplog):
    """But for a key that is overridden, by which the user says what holds."""
    weights = conversion_models.image_model((8, 8, 1), compose=None, norm_epsilon=1e-3)[2]
    other = weights.description._replace(pp="decode(1)|resize(8)|value_range(0, 1)")
    folder = conversion_models.write(weights._replace(description=other), tmp_path / "weights")
    sizes = [f"model.{key}={value}" for key, value in {**conversion_models.VIT, "compose": None}.items()]
    words = ["--config", "vit_digits", *(f"--config.{word}" for word in sizes), "--checkpoint", str(folder)]
    assert cli.run(evaluate.main, words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "model.norm_epsilon=1e-06 (0.001 there), pp_predict=" in err
    assert "say which holds: --config.model.norm_epsilon=0.001 --config.pp_predict=" in err
    said = [*sizes, "model.norm_epsilon=1e-6", f"pp_predict={other.pp}"]
    opened = open_model(folder, config=configs.load("vit_digits", said), overrides=said)
    assert (opened.module.norm_epsilon, opened.preprocessing) == (1e-6, other.pp)
    assert "differs" not in caplog.text
    open_model(folder, config=configs.load("vit_digits", sizes))  # from Python, no override could say it
    assert "the config differs from the model of" in caplog.text


@pytest.mark.slow
def test_tokenizer_is_that_of_the_training_data(tmp_path):
    corpora.train_tokenizer(tmp_path / "tokenizer.json")
    path = str(tmp_path / "tokenizer.json")
    text = {"kind": "text", "path": "x", "context": 8, "tokenizer": path}
    tokens = {"kind": "input_ids", "path": "x", "context": 8}

    def of(data, given=None, vocab_size=1000):
        config = configs.load("lm_stdlib", [f"vocab_size={vocab_size}", "model.context=8"])
        opened = Opened(tmp_path, tmp_path, values.replaced(config, input={"data": data}), make_model(config), {})
        return open_tokenizer_of(opened, given)

    assert of({"kind": "stdlib"}).vocab_size == 257
    assert of(text).encode("a") == of(tokens, path).encode("a") == of({**tokens, "tokenizer": path}).encode("a")
    assert of(text).end_of_text == of(tokens, path).end_of_text
    assert of({**tokens, "tokenizer": path, "end_of_text": 7}).end_of_text == 7
    with pytest.raises(errors.ConfigError, match="give --tokenizer"):
        of(tokens)
    with pytest.raises(errors.ConfigError, match="tokens, the model 100"):
        of(text, vocab_size=100)
