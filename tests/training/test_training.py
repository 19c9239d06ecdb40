"""Training as a whole: deterministic, resumable, equal under accumulation, and refusing what cannot work."""

import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcvit import config as configs
from dcvit import train
from dcvit.checkpoint.checkpointer import load_params
from dcvit.parallel import sharding
from dcvit.runs import metrics
from dcvit.training import setup, step
from dcvit.training.tasks import TrainingData

pytestmark = pytest.mark.usefixtures("library_promotion")

COMPOSED = {"model.compose": "both"}  # which tiny runs are not


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_one_seed_gives_one_result_and_another_seed_another(digits_run):
    runs = [digits_run(name, **o) for name, o in {"a": {}, "b": {}, "c": {"seed": 1}}.items()]
    assert [status for status, _ in runs] == [0, 0, 0]
    a, b, c = (load_params(workdir) for _, workdir in runs)
    assert same(a, b)
    assert not same(a, c)
    texts = [(workdir / "metrics.jsonl").read_bytes() for _, workdir in runs]
    assert texts[0] == texts[1] != texts[2]


def test_a_run_writes_its_config_classes_and_one_row_a_logged_step(digits_run):
    status, workdir = digits_run(log_steps=4)
    assert status == 0
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 4, 6]
    assert rows[0]["num_params"] == sum(x.size for x in jax.tree.leaves(load_params(workdir)))
    assert ["test/top1" in row for row in rows] == [True, True, False, True]
    assert all(row["test/n"] == 360 for row in rows if "test/n" in row)
    assert [row["step"] for row in metrics.read(workdir / "timing.jsonl")] == [4, 6]
    data = json.loads((workdir / "data.json").read_text())
    assert (data["examples"], data["class_names"]) == (1437, list("0123456789"))
    assert configs.read_json(workdir / "config.json").total_steps == 6


def test_a_stopped_run_goes_on_to_the_same_end(digits_run, monkeypatch):
    options = {"ema_decay": 0.9, "mixup": 0.2, **COMPOSED}
    _, whole = digits_run("whole", **options)
    calls = []

    def stop(self, step, state, start):
        calls.append(step)
        if step == 5 and len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(train.Loop, "_profile", stop)
    status, workdir = digits_run("stopped", **options)
    assert status == 130
    assert [row["step"] for row in metrics.read(workdir / "metrics.jsonl")] == [0, 2, 3, 4]
    status, workdir = digits_run("stopped", **options)
    assert status == 0
    assert calls == [1, 2, 3, 4, 5, 4, 5, 6]  # from the checkpoint of step 3
    assert same(load_params(whole), load_params(workdir))
    assert (whole / "metrics.jsonl").read_bytes() == (workdir / "metrics.jsonl").read_bytes()


def test_a_finished_run_started_again_changes_nothing(digits_run):
    _, workdir = digits_run()
    before = (workdir / "metrics.jsonl").read_bytes()
    status, _ = digits_run()
    assert status == 0
    assert (workdir / "metrics.jsonl").read_bytes() == before


def small(**overrides):
    """A small config, with plain attention, which compiles soonest."""
    options = {"total_steps": 10, "model.width": 16, "model.depth": 1, "model.compose": None, **overrides}
    return configs.load("vit_digits", [f"{k}={v}" for k, v in options.items()])


def make(**overrides):
    """A net, its parameters, a batch and a step function of a small config."""
    config = small(**overrides)
    data = TrainingData(config, setup.mesh(config))
    net = setup.model(config)
    params = net.init(jax.random.key(0), jnp.zeros(data.task.example.shape))["params"]
    params = jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape), params)
    tx, schedule = setup.optimiser(config, params, data)
    batch = {k: jnp.asarray(v) for k, v in next(data.batches(0)).items()}
    return (
        step.initial_state(config, params, tx),
        batch,
        jax.jit(step.make_update(net, data.task, tx, schedule)),
    )


@pytest.mark.parametrize("mixup", [0.0, 0.2])
@pytest.mark.parametrize("parts", [2, 8])
def test_accumulated_gradients_equal_those_of_the_large_batch(parts, mixup):
    # Plain gradient descent: Adam would blow rounding errors in near-zero gradients up to full steps.
    options = {"optax_name": "scale_by_learning_rate", "optax": {"learning_rate": -1.0}, "mixup": mixup}
    options |= {"schedule": {"decay_type": "constant"}, "lr": 0.1}
    state, batch, update = make(**options)
    _, _, accumulated = make(**options, grad_accum=parts)
    (one, m_one), (many, m_many) = update(state, batch), accumulated(state, batch)
    assert float(m_many["loss"]) == pytest.approx(float(m_one["loss"]), rel=1e-5)
    assert float(m_many["grad_norm"]) == pytest.approx(float(m_one["grad_norm"]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), many.params, one.params)
    assert not same(one.params, state.params)


def test_averaged_weights_follow_their_definition():
    state, batch, update = make(ema_decay=0.8)
    expected = state.params
    for _ in range(3):
        state, _ = update(state, batch)
        expected = jax.tree.map(lambda e, p: 0.8 * e + 0.2 * p, expected, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.ema, expected)
    assert state.best is state.ema


def test_the_steps_loss_and_gradient_are_those_of_the_model():
    state, batch, update = make(label_smoothing=0.1)
    net = setup.model(small())

    def loss(params):
        images = batch["image"].astype(jnp.float32) / 127.5 - 1
        log_p = nn.log_softmax(net.apply({"params": params}, images)[0])
        return -jnp.mean(jnp.sum((0.9 * batch["labels"] + 0.01) * log_p, axis=-1))

    value, grads = jax.value_and_grad(loss)(state.params)
    _, got = update(state, batch)
    assert float(got["loss"]) == pytest.approx(float(value), rel=1e-5)
    assert float(got["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    assert float(got["lr"]) == 0  # the first step of the warm-up


def test_frozen_parameters_do_not_move_in_a_run(digits_run):
    status, workdir = digits_run(frozen=["Transformer/.*"], model_init="none")
    assert status == 0
    end = load_params(workdir)
    _, other = digits_run("longer", frozen=["Transformer/.*"], total_steps=8)
    assert same(end["Transformer"], load_params(other)["Transformer"])
    assert not same(end["head"], load_params(other)["head"])


def test_what_is_not_loaded_starts_from_the_seed(digits_run):
    still = {"total_steps": 1, "ckpt_steps": 1, "lr": 0.0, "wd": 0.0}
    _, first = digits_run("first")
    _, fresh = digits_run("fresh", **still)
    status, mixed = digits_run("mixed", model_init=first, **{"model_load.dont_load": ["head/.*"]}, **still)
    assert status == 0
    assert same(load_params(mixed)["Transformer"], load_params(first)["Transformer"])
    assert same(load_params(mixed)["head"], load_params(fresh)["head"])
    assert not same(load_params(mixed)["head"], load_params(first)["head"])


def test_a_run_starts_from_another_runs_parameters(digits_run):
    _, first = digits_run("first")
    status, second = digits_run("second", model_init=first, total_steps=1, ckpt_steps=1, lr=0.0, wd=0.0)
    assert status == 0
    assert same(load_params(first), load_params(second))


@pytest.mark.parametrize("steps", [(2, 3), (5, 6), (6, 100)])
def test_a_profile_is_recorded_for_the_given_steps(digits_run, steps):
    status, workdir = digits_run(profile=steps)
    assert status == 0
    assert list((workdir / "profile").rglob("*.xplane.pb"))


def test_a_profile_window_begun_before_a_stop_is_recorded_after_it(digits_run, monkeypatch):
    def stop(self, step, state, start):
        if step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "_profile", stop)
        assert digits_run(profile=(2, 5))[0] == 130
    status, workdir = digits_run(profile=(2, 5))
    assert status == 0
    assert list((workdir / "profile").rglob("*.xplane.pb"))


def test_the_last_step_evaluates_whatever_the_schedule(digits_run):
    status, workdir = digits_run(**{"evals.test.log_steps": 0}, log_steps=0)
    assert status == 0
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 6]
    assert rows[-1]["test/n"] == 360


def test_a_loss_that_is_no_number_ends_the_run_with_one_line(digits_run, capsys):
    status, workdir = digits_run(lr=1e38, grad_clip_norm="none")
    assert status == 2
    assert re.search(r"error: step \d: the loss is (nan|inf); stopped", capsys.readouterr().err)
    assert "NaN" not in (workdir / "metrics.jsonl").read_text()


def test_eight_devices_train_as_one_does():
    state, batch, update = make(**{"model.depth": 2})
    mesh = sharding.data_mesh()
    assert mesh.size == 8
    spread = jax.device_put(state, sharding.replicated(mesh))
    dealt = sharding.put_batch({k: np.asarray(v) for k, v in batch.items()}, mesh, len(batch["image"]))
    (one, m_one), (many, m_many) = update(state, batch), update(spread, dealt)
    assert float(m_many["loss"]) == pytest.approx(float(m_one["loss"]), rel=1e-5)
    assert float(m_many["grad_norm"]) == pytest.approx(float(m_one["grad_norm"]), rel=1e-5)
    assert dealt["image"].sharding.shard_shape(dealt["image"].shape)[0] == 8
    assert jax.tree.structure(one) == jax.tree.structure(many)


def test_tensorboard_gets_the_metrics_where_it_is_installed(digits_run):
    pytest.importorskip("tensorflow", reason="TensorBoard is written only where tensorflow is installed")
    status, workdir = digits_run(tensorboard=True, total_steps=2)
    assert status == 0
    events = b"".join(p.read_bytes() for p in workdir.glob("events.out.tfevents*"))
    assert b"test/top1" in events
    assert b"grad_norm" in events


FEW_SHOT = {"type": "fewshot", "data": {"kind": "digits"}, "test_data": {"kind": "digits"}, "pp": ""}


BAD = {
    "unknown field": ({"model.widht": 3}, "config.model has no option 'widht'; did you mean 'width'"),
    "wrong type": ({"model.depth": "two"}, "model.depth=two should be of type int"),
    "unknown variant": ({"model.variant": "DCViT-Q/2"}, "unknown variant 'DCViT-Q/2'"),
    "heads and width": ({"model.num_heads": 3}, "num_heads=3 does not divide width=16"),
    "groups and heads": ({**COMPOSED, "model.groups": 3}, "groups=3 does not divide num_heads=4"),
    "patch and image": ({"model.patch_size": (3, 3)}, "patch_size=(3, 3) does not divide the image, 8x8"),
    "unknown model": ({"model_name": "vitt"}, "did you mean 'vit'"),
    "unknown loss": ({"loss": "softmax"}, "did you mean 'softmax_xent'"),
    "unknown optimiser": ({"optax_name": "scale_by_adamm"}, "nearest: scale_by_adam"),
    "optimiser argument": ({"optax.beta1": 0.9}, "config.optax has no option 'beta1'"),
    "unknown schedule": ({"schedule.decay_type": "cosin"}, "decay_type='cosin'"),
    "schedule argument": ({"schedule.warm_steps": 1}, "did you mean 'warmup_steps'"),
    "long warm-up": ({"schedule.warmup_steps": 100}, "do not fit into 6 steps"),
    "no parameter": ({"frozen": ["heda/.*"]}, "'heda/.*' matches no parameter"),
    "batch": ({"input.batch_size": 60}, "is no multiple of grad_accum 1 × fsdp 1 × data 8 devices"),
    "large batch": ({"input.batch_size": 1600}, "1437 examples do not fill one batch of 1600"),
    "classes": ({"num_classes": 11}, "yields 10 classes, config.num_classes=11"),
    "fewer classes": (
        {"num_classes": 9, "input.pp": "value_range|onehot(9)"},
        "the data has 10 classes, config.num_cl",
    ),
    "preprocessing": ({"input.pp": "flip"}, "unknown op 'flip'; did you mean 'flip_lr'"),
    "no labels": ({"input.pp": "value_range"}, "expected image (height, width, channels) and labels"),
    "integer image": ({"input.pp": "onehot(10)"}, "add value_range(-1, 1)"),
    "data": ({"input.data.kind": "mnist"}, "unknown kind of data 'mnist'"),
    "data option": ({"input.data.spilt": "x"}, "did you mean 'split'"),
    "data limit": ({"input.data.limit": "abc"}, "config.input.data: limit='abc' should be of type int | None"),
    "data limit of truth": ({"evals.test.data.limit": True}, "config.evals.test.data: limit=True should be of type"),
    "data cache": ({"input.data.cache": "yes"}, "config.input.data: cache='yes' should be of type bool"),
    "corrupt": ({"input.corrupt": "ignore"}, "expected 'fail' or 'skip'"),
    "few-shot": ({"evals": {"a": FEW_SHOT | {"num_seeds": 0}}}, "few-shot: shots="),
    "few-shot data": ({"evals": {"a": FEW_SHOT | {"test_data": {"kind": "x"}}}}, "unknown kind of data 'x'"),
    "input key": ({"input.batchsize": 8}, "did you mean 'batch_size'"),
    "evaluator": ({"evals.test.type": "clasification"}, "did you mean 'classification'"),
    "evaluator option": ({"evals.test.batchsize": 8}, "did you mean 'batch_size'"),
    "evaluator image": ({"evals.test.pp": "resize_pillow(4)|value_range|onehot(10)"}, "yields images of (4, 4, 1)"),
    "evaluator batch": ({"evals.test.batch_size": 0}, "config.evals.test.batch_size=0 should be 1 or more"),
    "evaluator loss": ({"evals.test.loss": "xent"}, "config.evals.test.loss='xent'"),
    "evaluator duration": ({"evals.test.log_step": 5}, "config.evals.test has no option 'log_step'"),
    "optimiser dtype": ({"optax.mu_dtype": "bfloat17"}, "bfloat17"),
    "no heads": ({"model.num_heads": 0}, "num_heads=0 should be 1 or more"),
    "dropout": ({"model.dropout": 1.5}, "dropout=1.5 should be in [0, 1)"),
    "load option": ({"model_init": "absent", "model_load.dontload": []}, "config.model_load has no option 'dontload'"),
    "model field of the trainer": ({"model.num_classes": 5}, "the number of outputs is config.num_classes"),
    "no groups": ({**COMPOSED, "model.groups": 0}, "groups=0 does not divide num_heads=4"),
    "patch of words": ({"model.patch_size": "(4,'x')"}, "should be of type Sequence[int], not tuple"),
    "evaluator without kind": ({"evals.test.data": "{'split':'test'}"}, "config.evals.test.data.kind names the kind"),
    "evaluator kind of number": ({"evals.test.data": "{'kind':3}"}, "config.evals.test.data.kind names the kind"),
    "optimiser that needs more": ({"optax_name": "scale_by_polyak", "optax": {}}, "error: config"),
    "dictionary": ({"model": "{'a.b':2}"}, "error: "),
    "multiplier": ({"lr_mults": "[('.*',None)]"}, "should be pairs (regex, multiplier"),
    "load pattern": ({"model_init": "absent", "model_load.dont_load": "head/.*"}, "should be of type Sequence[str]"),
    "crop": ({"input.pp": "random_crop(-1)|value_range|onehot(10)"}, "random_crop: a size of -1 pixels"),
    "no checkpoint": ({"model_init": "absent"}, "no checkpoint in absent"),
    "no total": ({"total_steps": 0}, "give total_epochs"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_one_line_before_anything_is_written(digits_run, capsys, name):
    overrides, message = BAD[name]
    status, workdir = digits_run(**overrides)
    err = capsys.readouterr().err
    assert status == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not workdir.exists()


def test_a_workdir_of_another_config_is_refused_and_left_alone(digits_run, capsys):
    _, workdir = digits_run(total_steps=2)
    before = (workdir / "config.json").read_bytes()
    status, _ = digits_run(total_steps=2, lr=0.1)
    assert status == 2
    assert "lr (there 0.002, here 0.1)" in capsys.readouterr().err
    assert (workdir / "config.json").read_bytes() == before
    assert digits_run(total_steps=2, ckpt_steps=1)[0] == 0


def test_a_workdir_that_cannot_be_made_is_refused(digits_run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status, _ = digits_run("file/below")
    assert status == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: --config, --workdir"),
        (["--workdir", "w"], "required: --config"),
        (["--config", "vit_digits", "--workdir", "w", "--confg.seed=1"], "unknown option --confg.seed; did you mean"),
        (["--config", "vit_digits", "--workdir", "w", "more"], "unknown option more"),
    ],
)
def test_a_bad_command_line_is_one_line(capsys, argv, message):
    from dcvit import cli

    assert cli.run(train.main, argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_every_key_of_the_optimiser_reaches_it(monkeypatch):
    given = {}
    real = setup.optim.make
    monkeypatch.setattr(setup.optim, "make", lambda params, **kwargs: given.update(kwargs) or real(params, **kwargs))
    options = {
        "lr": 0.3, "wd": 0.2, "wd_times_lr": True, "wd_mults": (("head/.*", 2.0),), "lr_mults": (("head/.*", 3.0),),
        "frozen": ("embedding/.*",), "grad_clip_norm": 0.7, "optax_name": "scale_by_lion",
    }  # fmt: skip
    make(**options, optax={"b1": 0.5}, schedule={"decay_type": "linear", "warmup_percent": 20, "end": 0.1})
    assert {k: given[k] for k in options} == options
    assert given["optax_args"] == {"b1": 0.5}
    assert given["schedule_args"] == {"decay_type": "linear", "warmup_steps": 2, "cooldown_steps": 0, "end": 0.1}
    assert given["total_steps"] == 10


def test_the_loss_is_the_configs():
    losses = []
    for name in ("softmax_xent", "sigmoid_xent"):
        state, batch, update = make(loss=name)
        losses.append(float(update(state, batch)[1]["loss"]))
    logits = setup.model(small()).apply({"params": state.params}, batch["image"].astype(jnp.float32) / 127.5 - 1)[0]
    labels = 0.9 * batch["labels"] + 0.01
    sigmoid = -jnp.sum(labels * nn.log_sigmoid(logits) + (1 - labels) * nn.log_sigmoid(-logits), axis=-1).mean()
    assert losses[1] == pytest.approx(float(sigmoid), rel=1e-5)
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    "random", [{"model.dropout": 0.5}, {"mixup": 0.5}, {"model.stochastic_depth": 0.9, "model.depth": 2}]
)
def test_what_is_random_is_drawn_anew_at_each_step_and_the_same_at_the_same_step(random):
    state, batch, update = make(**random)
    at = [float(update(state.replace(step=jnp.int32(step)), batch)[1]["loss"]) for step in (0, 1, 1, 2)]
    assert at[1] == at[2]
    assert len(set(at)) == 3
