"""What evaluators share: batches that the devices divide, and a speed without compilation and padding."""

import importlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import input_pipeline
from dcvit import evaluators
from dcvit.models import vit
from dcvit.parallel.sharding import make_mesh


class Rows:
    """23 rows of tokens, as a language model reads them; two cannot be read."""

    class_names, nbytes = None, 0

    def __len__(self):
        return 23

    def __getitem__(self, index):
        if index in (3, 22):
            raise input_pipeline.InputError("broken")
        return {"tokens": np.full(5, index, np.int32), "is_target": np.arange(5) > index % 5}

    def describe(self, index):
        return f"row {index}"


def mesh_of(devices):
    return make_mesh([("data", -1)], jax.devices()[:devices])


@pytest.mark.parametrize(("batch", "devices", "size"), [(1, 1, 1), (7, 1, 7), (1, 8, 8), (9, 8, 16), (64, 8, 64)])
def test_every_example_comes_once_in_batches_that_the_devices_divide(batch, devices, size):
    corrupt = input_pipeline.CorruptPolicy("skip")
    found = list(evaluators.batches(Rows(), "", batch, mesh_of(devices), corrupt))
    assert {len(b["tokens"]) for b in found} == {size}
    real = np.concatenate([b["tokens"][b["_mask"] > 0, 0] for b in found])
    assert real.tolist() == [i for i in range(23) if i not in (3, 22)]


@pytest.mark.parametrize("devices", [1, 8])
def test_results_are_those_of_the_function_and_real_examples_count_for_the_speed(devices):
    mesh, traced = mesh_of(devices), []

    def targets(params, batch, scale):
        time.sleep(0.5)
        traced.append(1)
        return jnp.sum(jnp.where(batch["is_target"], batch["tokens"] * params, 0), axis=-1) * scale

    timed = evaluators.Timed(targets, mesh, 8)
    for batch in evaluators.batches(Rows(), "", 8, mesh, input_pipeline.CorruptPolicy("skip")):
        found, kept = timed(jnp.int32(2), batch, jnp.int32(3))
        np.testing.assert_array_equal(kept["_mask"], batch["_mask"])
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, 6 * (batch["tokens"] * batch["is_target"]).sum(axis=-1))
    assert len(traced) == 1
    assert timed.examples == 21
    assert 0 < timed.seconds < 0.5  # compilation is left out
    timed.restart()
    timed(jnp.int32(2), batch, jnp.int32(3))
    assert len(traced) == 1
    assert timed.examples == batch["_mask"].sum()


def test_images_are_described_by_size_and_operations():
    example = jax.ShapeDtypeStruct((1, 16, 32, 3), np.float32)
    about = evaluators.about_images(vit.Model(10, variant="ViT-S/16"), example)
    assert about["image_size"] == "16x32"
    assert about["gflops"] > 0
    assert evaluators.about_images(object(), example)["gflops"] is None


@pytest.mark.parametrize("kind", ["classification", "fewshot"])
def test_rows_hold_no_other_keys_than_the_columns(kind):
    evaluator = object.__new__(importlib.import_module(f"dcvit.evaluators.{kind}").Evaluator)
    evaluator.example, evaluator.shots = jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32), (1, 5)
    evaluator.images_per_second = 12.34
    numbers = {"1shot": 0.25, "5shot": 0.5} if kind == "fewshot" else {"top1": 0.5, "top5": 1.0, "loss": 2.0}
    rows = evaluator.rows("x", {**numbers, "n": 4}, None)
    assert [row.pop("evaluation") for row in rows] == (["x/1shot", "x/5shot"] if kind == "fewshot" else ["x"])
    assert [row["top1"] for row in rows] == ([0.25, 0.5] if kind == "fewshot" else [0.5])
    for row in rows:
        assert row.keys() <= set(evaluator.columns)
        assert (row["n"], row["images_per_second"], row["image_size"]) == (4, 12.3, "8x8")
