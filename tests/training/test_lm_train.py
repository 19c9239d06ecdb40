"""The language model through the same training, resume and evaluation as images, and its configs."""

import importlib.util
import json
import math
import re
import shutil
from pathlib import Path

import corpora
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit import cli, errors, evaluate, generate, tokenize, train
from dcvit import config as configs
from dcvit.checkpoint.checkpointer import load_params
from dcvit.evaluators.perplexity import Evaluator
from dcvit.models.presets import PRESETS
from dcvit.parallel import sharding
from dcvit.runs import metrics
from dcvit.training import setup, step
from dcvit.training.tasks import TrainingData

pytestmark = pytest.mark.usefixtures("library_promotion")

TINY = {
    "tensorboard": False, "total_steps": 6, "log_steps": 2, "ckpt_steps": 3,
    "input.data.context": 24, "input.data.limit": 400,
    "model.width": 16, "model.depth": 2, "model.num_heads": 2, "model.mlp_dim": 16,
    "evals.validation.data.context": 24, "evals.validation.data.limit": 21, "evals.validation.log_steps": 3,
}  # fmt: skip


def words(**overrides):
    return [f"--config.{key}={value}" for key, value in {**TINY, **overrides}.items()]


@pytest.fixture
def lm_run(tmp_path):
    """Runs a tiny training on the embedded text, as the command does; returns (exit status, workdir)."""

    def run(name="run", **overrides):
        argv = ["--config", "lm_stdlib", "--workdir", str(tmp_path / name), *words(**overrides)]
        return cli.run(train.main, argv), tmp_path / name

    return run


def tiny(**overrides):
    """The config, data and net of a tiny run, and parameters that are not nothing."""
    config = configs.load("lm_stdlib", [word.removeprefix("--config.") for word in words(**overrides)])
    data = TrainingData(config, setup.mesh(config))
    net = setup.model(data.config)
    params = net.init(jax.random.key(0), jnp.zeros(data.task.example.shape, jnp.int32))["params"]
    return data, net, jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size * 1.0)).reshape(p.shape), params)


def nats(net, params, tokens):
    """-log p of each token but the first of each row, by the whole softmax in float64."""
    logits = np.asarray(net.apply({"params": params}, jnp.asarray(tokens[:, :-1]))[0], np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return log_z - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(lm_run, monkeypatch):
    status, whole = lm_run("whole")
    assert status == 0
    real, calls = train.Loop._due, []

    def due(self, name, step):
        calls.append(step)
        if step == 5 and len(calls) < 100:
            calls.extend([0] * 100)
            raise KeyboardInterrupt
        return real(self, name, step)

    monkeypatch.setattr(train.Loop, "_due", due)
    assert lm_run("stopped")[0] == 130
    status, stopped = lm_run("stopped")
    assert status == 0
    assert (whole / "metrics.jsonl").read_bytes() == (stopped / "metrics.jsonl").read_bytes()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), load_params(whole), load_params(stopped))
    assert all(jax.tree.leaves(same))
    rows = metrics.read(whole / "metrics.jsonl")
    assert rows[-1]["validation/bits_per_byte"] < rows[0]["validation/bits_per_byte"] <= 8.1


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_steps_loss_is_the_mean_over_all_targets_and_parts_add_up(chunk):
    options = {"optax_name": "scale_by_learning_rate", "optax": {"learning_rate": -1.0}, "loss_chunk": chunk}
    steps = []
    for parts in (1, 4):
        data, net, params = tiny(**options, **{"input.batch_size": 32}, grad_accum=parts, wd=0.0)
        tx, schedule = setup.optimiser(data.config, params, data)
        batch = next(data.batches(0))
        batch["is_target"][3, 7:] = False  # as in the last row of a text, which is filled up
        batch["is_target"][9:] = False
        state = step.initial_state(data.config, params, tx)
        _, got = jax.jit(step.make_update(net, data.task, tx, schedule))(state, jax.tree.map(jnp.asarray, batch))
        steps.append(got)
    expected = nats(net, params, batch["tokens"])[batch["is_target"][:, 1:]].mean()
    for got in steps:
        assert float(got["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(steps[1]["grad_norm"]) == pytest.approx(float(steps[0]["grad_norm"]), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 16, 64])
def test_perplexity_is_exact_for_any_batch_size(batch_size):
    _, net, params = tiny()
    options = {"kind": "stdlib", "split": "validation", "context": 24, "limit": 21}
    evaluator = Evaluator(
        setup.predictor(net), sharding.data_mesh(), data=options, batch_size=batch_size, loss_chunk=10
    )
    rows = [evaluator.source[i] for i in range(21)]
    tokens, counted = (np.stack([row[key] for row in rows]) for key in ("tokens", "is_target"))
    tokens[5, 11] = 256  # so that a document ends
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


def test_only_a_target_span_counts(tmp_path):
    """Loss on the target span only, as the paper measures Flan."""
    lines = [{"inputs": "1+1=", "targets": "2"}, {"inputs": "name: ", "targets": "Ada Lovelace"}]
    (tmp_path / "flan.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, net, params = tiny()
    options = {"kind": "spans", "path": str(tmp_path / "flan.jsonl"), "context": 24}
    evaluator = Evaluator(setup.predictor(net), sharding.data_mesh(), data=options)
    total = 0.0
    for line in lines:
        tokens = np.array([*(line["inputs"] + line["targets"]).encode(), 256])[None]
        total += nats(net, params, tokens)[0, len(line["inputs"]) - 1 :].sum()
    got = evaluator.run(params)
    assert (got["tokens"], got["bytes"], got["documents"]) == (15, 13, 2)
    assert got["loss"] == pytest.approx(total / 15, rel=1e-5)


@pytest.mark.slow
def test_evaluate_reads_what_training_wrote(lm_run, tmp_path, capsys):
    _, workdir = lm_run(document_mask=True, z_loss=1e-4)
    config = json.loads((workdir / "config.json").read_text())
    assert (config["vocab_size"], config["model"]["end_of_text"], config["model"]["context"]) == (257, 256, 24)
    capsys.readouterr()
    out = tmp_path / "results.csv"
    assert cli.run(evaluate.main, ["--workdir", str(workdir), "--format", "json", "--out", str(out)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    last = metrics.read(workdir / "metrics.jsonl")[-1]
    assert row["loss"] == pytest.approx(last["validation/loss"], rel=1e-6)
    assert (row["tokens"], row["step"]) == (21 * 24, 6)
    assert out.read_text().startswith("evaluation,model,step,parameters,loss,perplexity,bits_per_byte,")
    # another config, with what the data said of this run, from the run and without it
    argv = ["--config", "lm_stdlib", "--format", "json", *words(vocab_size="none", document_mask=True)]
    assert cli.run(evaluate.main, [*argv, "--workdir", str(workdir)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == row["loss"]
    alone = [*argv, "--checkpoint", str(workdir), "--config.vocab_size=257"]
    assert cli.run(evaluate.main, alone) == 2
    assert "config.model.end_of_text is not known" in capsys.readouterr().err
    assert cli.run(evaluate.main, [*alone, "--config.model.end_of_text=256"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == row["loss"]


def test_without_its_run_a_model_has_the_context_of_the_configs_data(tmp_path):
    parser = cli.Parser()
    evaluate.add_options(parser)
    argv = ["--config", "lm_stdlib", "--checkpoint", str(tmp_path), *words()]
    config, _ = evaluate.run_config(*parser.parse(argv))
    assert config.model.context == 24


@pytest.mark.parametrize(
    ("overrides", "message"),
    {
        "unknown preset": ({"model.preset": "DCFormer-405"}, "DCFormer-405M"),
        "too small a vocabulary": ({"vocab_size": 200}, "has 257 tokens, config.vocab_size=200"),
        "context above the model's": ({"model.context": 8}, "config.model.context=8 is less than the data's 24"),
        "images for a language model": ({"input.data": {"kind": "digits"}}, "holds no text"),
        "an image evaluator": ({"evals.validation.type": "classification"}, "known: perplexity"),
        "mixup": ({"mixup": 0.2}, "config.mixup=0.2 is for images"),
        "another loss": ({"loss": "sigmoid_xent"}, "softmax_xent"),
        "a split that is not there": ({"input.data.split": "test"}, "no split 'test'"),
        "window pattern": ({"model.window_pattern": "2:1"}, "window_pattern='2:1'"),
        "chunk of nothing": ({"loss_chunk": 0}, "config.loss_chunk=0 should be 1 or more"),
        "chunk of nothing in an evaluation": (
            {"evals.validation.loss_chunk": 0},
            "validation.loss_chunk=0 should be 1",
        ),
        "rows to evaluate above the learned positions": (
            {"model.position": "learned", "evals.validation.data.context": 30},
            "30 tokens are more than the model's",
        ),
        "a misspelt field": ({"model.windows": 3}, "did you mean 'window'"),
        "vocabulary as a field": ({"model.vocab_size": 3}, "config.vocab_size"),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_one_line_before_anything_is_written(lm_run, capsys, overrides, message):
    status, workdir = lm_run(**overrides)
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not workdir.exists()


def test_text_for_an_image_model_is_refused(tmp_path, capsys):
    argv = ["--config", "vit_digits", "--workdir", str(tmp_path / "w"), "--config.input.data={'kind': 'stdlib'}"]
    assert cli.run(train.main, argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


PILE = Path(__file__).resolve().parents[2] / "configs" / "lm_pile.py"


def lm_pile():
    """The config file as a module."""
    spec = importlib.util.spec_from_file_location("lm_pile", PILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_of_presets_holds(preset):
    """Parameters, steps, batch and tokens as the docstring of configs/lm_pile.py lists them."""
    config = configs.load(f"{PILE}:preset={preset}")
    shapes = setup.param_shapes(setup.model(config), jax.ShapeDtypeStruct((1, 16), jnp.int32))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    steps, batch = config.total_steps, config.input.batch_size
    (line,) = re.findall(rf"^    {re.escape(preset)} .*", lm_pile().__doc__, re.MULTILINE)
    tokens = f"{steps * batch * config.model.context / 1e9:.0f}B"
    assert line.split()[:5] == [preset, f"{count:,}", f"{steps:,}", f"{batch:,}", tokens]


def test_the_recipe_of_the_pile():
    config = configs.load(f"{PILE}:preset=DCFormer++-405M")
    assert (config.lr, config.wd, config.wd_times_lr, config.grad_clip_norm) == (3e-4, 0.1, True, 1.0)
    assert config.optax.to_dict() == {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
    assert config.schedule.to_dict() == {"decay_type": "cosine", "warmup_percent": 1, "end": 0.1}
    rates = {name: configs.load(f"{PILE}:preset={name}").lr for name in PRESETS}
    assert rates["DCFormer-834M"] == 2.5e-4
    assert rates["Transformer++-1.4B"] == 2e-4
    assert (rates["DCPythia-2.8B"], rates["DCPythia-6.9B"], rates["Pythia-12B"]) == (1.6e-4, 1.2e-4, 1.2e-4)
    assert rates["DCFormer++-2.8B"] == 3.2e-4
    shapes = setup.param_shapes(setup.model(config), jax.ShapeDtypeStruct((1, 16), jnp.int32))
    decays = setup.optim.first_match(shapes, config.wd_mults, 0.0, "wd_mults")
    for path, rate in jax.tree_util.tree_leaves_with_path(decays):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert rate == (0.0 if name.endswith(("scale", "bias")) else 1.0), name


ABLATIONS = {  # Tables 9 and 10: the config's arguments, and what they do to the attention
    "compose=both,projection=false,gate=false,static=true": {"projection": False, "gate": False, "static": True},
    "gate=false": {"gate": False},
    "projection=false": {"projection": False},
    "static=true": {"static": True},
    "branches=q": {"branches": "q"},
    "branches=k": {"branches": "k"},
    "compose=pre": {"compose": "pre"},
    "compose=post": {"compose": "post"},
    "compose=none": {"compose": None},
    "rank=1": {"rank": 1},
    "rank=4": {"rank": 4},
    "window_pattern=3:1": {"window_pattern": "3:1"},
    "window_pattern=7:1": {"window_pattern": "7:1"},
    "window_pattern=3:1,branches=q": {"window_pattern": "3:1", "branches": "q"},
    "groups=2": {"groups": 2},
}


@pytest.mark.parametrize("arguments", ABLATIONS)
def test_every_ablation_is_an_argument(arguments):
    for preset in ("DCFormer++-405M", "DCPythia-6.9B"):
        config = configs.load(f"{PILE}:preset={preset},{arguments}")
        net = setup.model(config)
        assert {key: getattr(net, key) for key in ABLATIONS[arguments]} == ABLATIONS[arguments]
        setup.param_shapes(net, jax.ShapeDtypeStruct((1, 64), jnp.int32))


@pytest.fixture
def tokens(tmp_path):
    """A Megatron pair of bytes as the tokenise command writes it, in a folder of its own."""
    (tmp_path / "text").mkdir()
    for i in range(6):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox. " * 100)
    assert cli.run(tokenize.main, ["--data", str(tmp_path / "text"), "--out", str(tmp_path / "pile" / "all")]) == 0
    return tmp_path / "pile"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["DCFormer++-405M", "Pythia-2.8B"])
def test_the_config_of_the_pile_trains_evaluates_and_generates(tokens, tmp_path, capsys, preset):
    """configs/lm_pile.py, unchanged, from a checkpoint of half the steps to text."""
    arguments = f"preset={preset},data={tokens},context=32,validation=16,vocab_size=320,runlocal=true"
    argv = ["--config", f"{PILE}:{arguments}", "--workdir", str(tmp_path / "w"), "--config.input.batch_size=8"]
    assert cli.run(train.main, [*argv, "--config.tensorboard=false"]) == 0
    rows = metrics.read(tmp_path / "w" / "metrics.jsonl")
    assert [row["step"] for row in rows if "validation/loss" in row] == [0, 6, 12]
    # 6 · 2113 tokens are 384 rows of 33 and 6 tokens more, of which 5 are targets
    assert (rows[-1]["validation/tokens"], rows[-1]["validation/documents"]) == (15 * 32 + 5, 1)
    assert rows[-1]["validation/bytes"] == 15 * 32 + 4
    assert rows[-1]["loss"] < rows[1]["loss"]
    capsys.readouterr()
    # the pair's description says that its tokens are bytes
    assert cli.run(generate.main, ["--workdir", str(tmp_path / "w"), "--prompt", "the ", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    shutil.rmtree(tokens)
    assert cli.run(generate.main, ["--workdir", str(tmp_path / "w"), "--prompt", "the "]) == 2
    assert "give --tokenizer" in capsys.readouterr().err


def test_a_run_knows_the_tokenizer_of_its_text(tmp_path):
    corpora.train_tokenizer(tmp_path / "tokenizer.json")
    path = str(tmp_path / "tokenizer.json")
    text = {"kind": "text", "path": "x", "context": 8, "tokenizer": path}
    tokens = {"kind": "input_ids", "path": "x", "context": 8}

    def of(data, given=None, vocab_size=1000):
        config = configs.load("lm_stdlib", [f"vocab_size={vocab_size}"])
        return setup.tokenizer(configs.replaced(config, input={"data": data}), given)

    assert of({"kind": "stdlib"}).vocab_size == 257
    assert of(text).encode("a") == of(tokens, path).encode("a") == of({**tokens, "tokenizer": path}).encode("a")
    assert of(text).end_of_text == of(tokens, path).end_of_text
    assert of({**tokens, "tokenizer": path, "end_of_text": 7}).end_of_text == 7
    with pytest.raises(errors.ConfigError, match="give --tokenizer"):
        of(tokens)
    # as configs/lm_pile.py asks for it, where the description beside the tokens knows what ends a document
    corpora.write_jsonl(tmp_path / "a.jsonl", ["some text"] * 9)
    argv = ["--data", str(tmp_path / "a.jsonl"), "--tokenizer", path, "--out", str(tmp_path / "all")]
    assert cli.run(tokenize.main, argv) == 0
    pair = {"kind": "megatron", "path": str(tmp_path / "all"), "context": 8, "end_of_text": None}
    assert of(pair).end_of_text == of(pair, path).end_of_text == of(text).end_of_text is not None
    with pytest.raises(errors.ConfigError, match="tokens, the model 100"):
        of(text, vocab_size=100)


def test_texts_that_end_otherwise_are_not_evaluated_together(tokens, lm_run, capsys):
    data = {"kind": "megatron", "path": str(tokens), "context": 24, "end_of_text": 0}
    status, workdir = lm_run(**{"evals.validation.data": data, "evals.validation.data.context": 24})
    assert status == 2
    assert "ends documents with token 0, the training data with 256" in capsys.readouterr().err
    assert not workdir.exists()


def test_raw_text_of_the_pile_needs_a_tokenizer():
    with pytest.raises(errors.ConfigError, match="kind=text needs tokenizer"):
        configs.load(f"{PILE}:kind=text,data=x")
