"""Distillation: its losses, the teacher's view of a batch, runs that resume, and invalid options."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file
from scipy.special import log_softmax, softmax
from small_models import jit, param_shapes, random_params
from training_runs import (
    digits_command,
    perturbed_params,
    refusal,
    small_setup,
    steps_of,
)

import dcvit
from dcvit import cli, evaluate
from dcvit.errors import CheckpointError
from dcvit.models import vit
from dcvit.parallel.trees import by_name
from dcvit.runs import metrics, restoring
from dcvit.runs.steps import step_folder
from dcvit.training import distillation, step
from dcvit.training.distillation import normalizer
from input_pipeline import Preprocess

pytestmark = [pytest.mark.usefixtures("library_promotion")]

FIELDS = {"width": 8, "depth": 1, "mlp_dim": 16, "num_heads": 2, "patch_size": [4, 4], "head_zeroinit": False}
PP = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)"
FIXED = 'value_range(-1, 1)|onehot(10)|keep("image", "labels")'  # preprocessing without a random choice
RNG = np.random.default_rng(0)
TWO_HEADS = {"model.pool_type": "tok+reg", "model.registers": 1, "model.head_zeroinit": False}


def save_teacher(folder, pp=PP, classes=10, names=(), seed=1, multilabel=False, **fields):
    """Write a small ViT with random parameters, as `dcvit convert --to safetensors` does; return its folder."""
    fields = {**FIELDS, **fields}
    net = vit.Model(classes, **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    params = random_params(param_shapes(net, jnp.zeros((1, 8, 8, 1))), seed, 0.5)
    folder.mkdir()
    save_file({name: np.asarray(x) for name, x in by_name(params).items()}, folder / "model.safetensors")
    described = {"model_name": "vit", "num_outputs": classes, "fields": fields, "pp": pp}
    content = {"dcvit": {**described, "class_names": list(names), "multilabel": multilabel}}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


def oracle(loss, student, teacher, temperature=1.0):
    """Return the loss of each example in float64."""
    student, teacher = np.asarray(student, np.float64), np.asarray(teacher, np.float64)
    if loss == "hard":
        return -np.take_along_axis(log_softmax(student, -1), teacher.argmax(-1)[:, None], -1)[:, 0]
    p = softmax(teacher / temperature, -1)
    return temperature**2 * np.sum(p * (np.log(p) - log_softmax(student / temperature, -1)), -1)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_losses_equal_their_formulas(temperature):
    student, teacher = jnp.asarray(np.random.default_rng(0).normal(0, 3, (2, 7, 5)), jnp.float32)
    found = distillation.kl(student, teacher, temperature)
    np.testing.assert_allclose(found, oracle("kl", student, teacher, temperature), rtol=1e-5)
    np.testing.assert_allclose(distillation.hard(student, teacher), oracle("hard", student, teacher), rtol=1e-5)
    assert np.abs(distillation.kl(teacher, teacher, temperature)).max() < 1e-5


@pytest.mark.interop
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_losses_and_gradients_equal_those_of_pytorch(temperature):
    """`kl_div` as DeiT's `DistillationLoss` calls it, but as a mean over examples instead of numbers."""
    import torch
    from torch.nn import functional

    student, teacher = np.random.default_rng(0).normal(0, 3, (2, 7, 5)).astype(np.float32)
    ours, theirs = torch.tensor(student, requires_grad=True), torch.tensor(teacher)
    logs = [functional.log_softmax(x / temperature, dim=1) for x in (ours, theirs)]
    kl = functional.kl_div(*logs, reduction="batchmean", log_target=True) * temperature**2
    for expected, loss in (
        (kl, lambda x: distillation.kl(x, jnp.asarray(teacher), temperature)),
        (functional.cross_entropy(ours, theirs.argmax(dim=1)), lambda x: distillation.hard(x, jnp.asarray(teacher))),
    ):
        (gradient,) = torch.autograd.grad(expected, ours)
        found, of_student = jax.value_and_grad(lambda x, loss=loss: jnp.mean(loss(x)))(jnp.asarray(student))
        np.testing.assert_allclose(found, expected.detach(), rtol=1e-5)
        np.testing.assert_allclose(of_student, gradient, atol=1e-6)


RANGES = ["value_range(-1, 1)", "value_range(0, 1)", "vgg_value_range", "value_range(-1, 1, 20, 230)",
          "value_range(0, 1, [123.675, 116.28, 103.53], [182.07, 173.4, 160.905])"]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), [*zip(RANGES, RANGES[1:] + RANGES[:1], strict=True), RANGES[:1] * 2])
def test_pixels_are_converted_to_the_teachers_range(ours, theirs):
    image = np.random.default_rng(0).integers(0, 256, (6, 5, 3)).astype(np.uint8)
    mine, expected = (Preprocess(pp)({"image": image}, RNG)["image"] for pp in (ours, theirs))
    convert = normalizer(f"flip_lr|{ours}", f"decode|resize(7)|{theirs}", 3)
    found = convert(jnp.asarray(mine)[None])[0]
    np.testing.assert_allclose(found, expected, atol=2e-6 * max(1, np.abs(expected).max()))
    if ours == theirs:
        assert convert(mine) is mine


def prepared_batch(setup):
    """Return a batch for the loss and its dropout key, as the first step of a run computes them."""
    batch = {k: jnp.asarray(v) for k, v in next(setup.data.batches(0)).items()}
    keys = jax.random.split(jax.random.fold_in(jax.random.key(setup.config.seed), 0))
    return jit(setup.task.prepare)(batch, keys[0]), keys[1]


def loss_of(setup, state, batch, key):
    return jit(step.make_objective(setup, setup.model.module))(state.params, state, batch, key)


def outputs(setup, params, batch):
    return jit(setup.model.module.apply)({"params": params}, batch["image"])


def loaded_state(setup):
    mesh, strategy = setup.model.mesh, setup.model.strategy
    return step.initial_state(setup, perturbed_params(setup), setup.task.distillation.load(mesh, strategy))


VIEWS = {
    "kl": {"distill.temperature": 2.0, "distill.weight": 0.3},
    "two heads": {"distill.loss": "hard", **TWO_HEADS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_both_models_see_the_same_mixed_and_erased_images(tmp_path, name):
    """The loss of a step equals the formula for the logits that both models compute for the augmented batch."""
    folder = save_teacher(tmp_path / "teacher", PP.replace("(-1, 1)", "(0, 1)"))
    options = {"mixup": 0.5, "cutmix": 0.5, "reprob": 0.5, "label_smoothing": 0.1, **VIEWS[name]}
    setup = small_setup(**{"distill.teacher": folder, **options})
    state, (batch, key) = loaded_state(setup), prepared_batch(setup)
    found = loss_of(setup, state, batch, key)
    logits, out = outputs(setup, state.params, batch)
    mine = [np.asarray(logits)] * 2
    if name == "two heads":
        tokens, kernel, bias = out["encoded"], *(np.asarray(state.params["head"][name]) for name in ("kernel", "bias"))
        mine = [2 * np.asarray(tokens)[:, i] @ half + bias for i, half in enumerate(np.split(kernel, 2))]
        np.testing.assert_allclose((mine[0] + mine[1]) / 2, logits, atol=1e-5)  # inference averages both
    theirs = dcvit.load(folder).features(np.asarray((batch["image"] + 1) / 2), "logits")
    chosen = setup.task.distillation.options
    of_labels = optax.softmax_cross_entropy(mine[0], batch["labels"])
    of_teacher = oracle(chosen.loss, mine[1], theirs, chosen.temperature)
    expected = np.mean((1 - chosen.weight) * of_labels + chosen.weight * of_teacher)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert abs(found - np.mean(of_labels)) > 1e-3


@pytest.mark.exhaustive
def test_parts_of_a_batch_train_the_student_as_the_whole_batch_does(teacher):
    options = {"distill.teacher": teacher, "mixup": 0.3, "input.batch_size": 16, "lr": 0.1}
    options["model.head_zeroinit"] = False  # which would make the gradients of all layers below it zero
    options |= {"optax_name": "trace", "optax": {"decay": 0.0}, "schedule": {"decay_type": "constant"}}
    found = [jax.device_get(steps_of(small_setup(**options, grad_accum=parts), 1)[:2]) for parts in (1, 2)]
    (before, whole), (_, parts) = found
    largest = 0.0
    for old, new, again in zip(*(jax.tree.leaves(state.params) for state in (before, whole, parts)), strict=True):
        np.testing.assert_allclose(again, new, atol=1e-6)
        largest = max(largest, np.abs(new - old).max())
    assert largest > 1e-3


def distill(teacher, workdir, *words, **options):
    """Train a tiny student as the command does; return the exit status."""
    return digits_command(workdir, *words, **{"distill.teacher": teacher, "input.pp": FIXED, **options})


@pytest.mark.slow
def test_a_student_is_opened_and_evaluated_without_its_teacher(teacher, tmp_path, capsys):
    mine = shutil.copytree(teacher, tmp_path / "teacher")
    assert distill(mine, tmp_path / "run", **TWO_HEADS) == 0
    saved = restoring.open_params(step_folder(tmp_path / "run"))
    assert saved.keys() == by_name(dcvit.load(tmp_path / "run").params).keys()
    shutil.rmtree(mine)
    model = dcvit.load(tmp_path / "run")
    row = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    capsys.readouterr()
    assert cli.run(evaluate.main, ["--workdir", str(tmp_path / "run"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == pytest.approx(row["test/loss"], rel=1e-6)
    assert len(model.predict(np.zeros((8, 8, 1), np.float32), topk=1)[0]) == 1


@pytest.mark.slow
def test_another_teacher_is_refused(teacher, tmp_path, capsys):
    mine = shutil.copytree(teacher, tmp_path / "teacher")
    assert distill(mine, tmp_path / "run", total_steps=1, ckpt_steps=1) == 0
    shutil.rmtree(mine)
    save_teacher(mine, seed=2)
    capsys.readouterr()
    assert distill(mine, tmp_path / "run", total_steps=1, ckpt_steps=1) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    named = "Transformer/encoder_norm/bias"
    assert f"config.distill.teacher has another {named} than when the run started" in err, err


@pytest.mark.slow
def test_a_teacher_of_another_image_size_is_adapted(tmp_path):
    folder = save_teacher(tmp_path / "teacher", posemb="learn")
    setup = small_setup(**{"distill.teacher": folder, "input.pp": f"pad(2)|{FIXED}", "pp_predict": ""})
    images = prepared_batch(setup)[0]["image"]
    assert images.shape[1:] == (12, 12, 1)
    found = jit(setup.task.distillation.logits)(loaded_state(setup).teacher, images)
    expected = dcvit.load(folder, image_size=12).features(np.asarray(images), "logits")
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.interop
def test_a_distilled_deit_of_transformers_is_a_teacher(tmp_path):
    """Its logits for the student's batch are those of transformers for the same pixels in its own normalization."""
    import torch
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    torch.manual_seed(0)
    config = transformers.DeiTConfig(**sizes, **images, initializer_range=0.3)
    model = transformers.DeiTForImageClassificationWithTeacher(config).eval()
    model.save_pretrained(tmp_path / "deit")
    processor = {"image_processor_type": "DeiTImageProcessor", "size": {"height": 8, "width": 8}, "resample": 3}
    processor |= {"do_center_crop": False, "image_mean": [0.4], "image_std": [0.25]}
    (tmp_path / "deit" / "preprocessor_config.json").write_text(json.dumps(processor))
    setup = small_setup(**{"distill.teacher": tmp_path / "deit", "mixup": 0.5})
    batch, _ = prepared_batch(setup)
    found = jit(setup.task.distillation.logits)(loaded_state(setup).teacher, batch["image"])
    pixels = ((np.asarray(batch["image"]) + 1) / 2 - 0.4) / 0.25
    with torch.no_grad():
        expected = model(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())).logits.numpy()
    assert expected.std() > 0.2
    np.testing.assert_allclose(found, expected, atol=3e-5)


BAD = {
    "sigmoid": ({"loss": "sigmoid_xent"}, "config.distill needs config.loss='softmax_xent', found 'sigmoid_xent'"),
    "two heads with rep_size": ({**TWO_HEADS, "model.rep_size": True}, "set config.model.rep_size=False"),
    "tensor": (
        {"mesh": (("data", 2), ("tensor", 4)), "sharding_strategy": "tensor", "model.num_heads": 4},
        "tensor 4 does not divide num_heads 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_line(name, teacher):
    overrides, message = BAD[name]
    assert message in refusal(small_setup, **({"distill.teacher": teacher, "input.pp": FIXED} | overrides))


TEACHERS = {
    "numbering": ({"names": [*map(str, range(1, 10)), "0"]}, "it has other classes: class 0 is '1' there and '0' in"),
    "no head": ({"classes": None}, "it is no classifier of images"),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_that_does_not_fit_is_one_line(tmp_path, name):
    options, message = TEACHERS[name]
    folder = save_teacher(tmp_path / "teacher", **options)
    found = refusal(small_setup, **{"distill.teacher": folder, "input.pp": FIXED})
    assert message in found
    assert found.startswith("config.distill.teacher=")


def test_a_missing_teacher_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"^config.distill.teacher=absent: .*the models of the package are digits"
    ):
        small_setup(**{"distill.teacher": "absent"})


def test_operations_of_a_step_count_the_teacher(teacher):
    """2 × multiply-adds of its 4 patches of 4×4 pixels, width 8, MLP 16 and 10 classes."""
    patches, width, mlp = 4, 8, 16
    block = 4 * patches * width**2 + 2 * patches**2 * width + 2 * patches * width * mlp
    expected = 2 * (patches * 16 * width + block + 10 * width)
    alone, distilled = (small_setup(**{"input.pp": FIXED}, **more) for more in ({}, {"distill.teacher": teacher}))
    assert step.step_flops(distilled) - step.step_flops(alone) == expected
