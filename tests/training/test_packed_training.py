"""Training on images of different sizes: packed batches, their steps on any devices, resuming, and refused configs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from trained_workdirs import TINY
from training_runs import digits_command, refusal, same, small_setup, steps_of

from dcvit import explore, load, predict
from dcvit.cli import run
from dcvit.config import load as configs
from dcvit.dcmha.plan import Selection, selecting
from dcvit.errors import ConfigError
from dcvit.runs import metrics
from dcvit.training.setup import make_setup
from input_pipeline import loader

PATCHES = "patches(2, 12)|value_range(-1, 1)|onehot(10)"
KEEP = 'keep("image", "grid", "labels")'
PACK = {"images": 4, "rows": 2, "tokens": 13}  # some images lose tokens
SIZES = {  # random crops of digits have different sizes
    "input.pp": f"inception_crop|flip_lr|{PATCHES}|{KEEP}", "input.batch_size": 32, "input.pack": PACK,
    "pp_predict": "decode(1, precise=True)|patches(2, 12)|value_range(-1, 1)",
}  # fmt: skip
setup_of = functools.partial(small_setup, **SIZES)
RUN = {**TINY, **SIZES, "evals.test.pp": f"{PATCHES}|{KEEP}", "model.patch_size": (2, 2), "model.depth": 1}


@pytest.fixture(scope="module")
def setup():
    with jax.numpy_dtype_promotion("standard"):
        return setup_of()


def test_a_batch_is_a_function_of_seed_and_step(setup, monkeypatch):
    """It does not depend on the number of threads, the rows of a host, or the step at which the stream starts."""
    second = [next(setup.data.batches(1))]
    stream = setup.data.batches(0)
    next(stream)
    second.append(next(stream))
    for threads in (0, 3):
        monkeypatch.setattr(loader, "thread_count", lambda number=threads: number)
        second.append(next(setup.data.batches(1)))
    assert all(same(second[0], batch) for batch in second[1:])
    part = next(setup.data.batches(1, rows=range(8, 24)))
    assert same(part, {name: array[8:24] for name, array in second[0].items()})
    assert {name: (like.shape, like.dtype) for name, like in setup.data.repeated().items()} == {
        name: (array.shape, array.dtype) for name, array in second[0].items()
    }


@functools.cache
def state_after(devices: int, **overrides):
    """Return the parameters and the metrics after two steps on a number of devices."""
    options = {"total_steps": 10, "model.width": 16, "model.depth": 1, "model.compose": None, **SIZES, **overrides}
    config = configs.load("vit_digits", [f"{k}={v}" for k, v in options.items()])
    setup = make_setup(config, devices=jax.devices()[:devices], evaluate=False)
    with selecting(Selection("off")):
        _, state, numbers = steps_of(setup, 2)
    return jax.device_get((state.params, numbers))


@pytest.mark.slow
def test_steps_are_equal_on_several_devices_and_in_parts(library_promotion):
    """Also the tokens that are dropped are the same."""
    (params, numbers), (expected, first) = state_after(4, grad_accum=2), state_after(1)
    assert numbers["tokens_dropped"] == first["tokens_dropped"] > 0
    assert numbers["loss"] == pytest.approx(first["loss"], rel=1e-5)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.slow
def test_packing_without_dropped_tokens_does_not_change_the_step(library_promotion):
    roomy = str({"images": 4, "rows": 4, "tokens": 12})
    (packed, numbers), (padded, _) = state_after(1, **{"input.pack": roomy}), state_after(1, **{"input.pack": "{}"})
    assert numbers["tokens_dropped"] == 0
    for x, y in zip(jax.tree.leaves(packed), jax.tree.leaves(padded), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.slow
def test_a_run_counts_tokens_and_its_model_predicts_images_of_any_size(tmp_path, capsys, library_promotion):
    workdir = tmp_path / "run"
    assert digits_command(workdir, base=RUN) == 0
    row = metrics.read(workdir / "metrics.jsonl")[-1]
    assert 0 < row["tokens_dropped"] < 1
    assert 0 < row["tokens_per_image"] <= 12
    assert row["test/n"] == 360
    from PIL import Image

    for name, size in {"wide": (9, 3), "tall": (3, 9), "dot": (1, 1)}.items():
        Image.new("L", size).save(tmp_path / f"{name}.png")
    capsys.readouterr()
    files = [str(path) for path in sorted(tmp_path.glob("*.png"))]
    assert run(predict.main, ["--workdir", str(workdir), *files, "--topk", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(files)
    model = load(workdir)
    both = model.features(files, "logits")
    np.testing.assert_allclose(np.concatenate([model.features(file, "logits") for file in files]), both, atol=1e-5)
    with refused(ConfigError, "not of the op patches"):
        model.attention(files)
    assert run(explore.main, ["--workdir", str(workdir), *files, "--out", str(tmp_path / "page.html")]) == 2
    assert "the explorer shows images of one size" in capsys.readouterr().err


def test_metrics_count_the_tokens_that_are_kept_and_dropped(setup):
    from dcvit.models.packed_images import PLACES, token_counts

    batch = next(setup.data.batches(0))
    sizes, kept = batch["grid"].prod(axis=1), batch[PLACES][:, 3]
    assert (kept < sizes).any()
    found = token_counts({name: jnp.asarray(array) for name, array in batch.items()})
    assert found["tokens_per_image"] == pytest.approx(kept.mean())
    assert found["tokens_dropped"] == pytest.approx(1 - kept.sum() / sizes.sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"input.pack": {"images": 4, "rows": 2, "tokens": 11}}, "less than max_tokens=12 of the op patches"),
        ({"input.pack": {"images": "4", "rows": 2, "tokens": 12}}, "images='4' should be of type int"),
        ({"input.pack": {"images": 4, "rows": 2.0, "tokens": 12}}, "rows=2.0 should be of type int"),
        ({"input.pack": {"images": 4, "rows": 10**9, "tokens": 12}}, "expected 1 ≤ rows ≤ images ≤ rows · tokens"),
        ({"mixup": 0.2, "reprob": 0.5}, "config.mixup is for images of one size"),
        ({"model.patch_size": (4, 4)}, "patch_size=(4, 4), but the op patches yields patches of 4 pixels"),
    ],
)
def test_configs_that_do_not_fit_packed_images_are_refused(overrides, message, library_promotion):
    assert message in refusal(setup_of, **overrides)
