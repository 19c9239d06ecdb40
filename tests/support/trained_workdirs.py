"""Overrides of tiny runs, and workdirs of small models that are trained once in a test session.

The fixtures are in conftest.py.
"""

import fcntl
import os

import jax
from flax.traverse_util import unflatten_dict

TINY = {
    "tensorboard": False,
    "total_steps": 6,
    "log_steps": 2,
    "ckpt_steps": 3,
    "model.width": 16,
    "model.depth": 0,  # with plain attention if a test adds layers, this compiles several times faster
    "model.mlp_dim": 16,
    "model.compose": None,
    "model.patch_size": (4, 4),
    "evals.test.log_steps": 3,
}
DIGITS = {
    "tensorboard": False,
    "total_steps": 60,
    "ckpt_steps": 30,
    "ckpt_keep": 2,
    "evals.test.log_steps": 30,
    "ema_decay": 0.9,
    "label_smoothing": 0.0,
    "lr": 0.01,
    "schedule.warmup_percent": 10,
    "input.pp": 'value_range(-1, 1)|onehot(10)|keep("image", "labels")',  # without crops 60 steps reach 87 %
    "model.width": 32,
    "model.depth": 1,
    "model.mlp_dim": 64,
    "model.compose": None,
    "model.patch_size": (4, 4),
}
LM_TINY = {
    "tensorboard": False,
    "total_steps": 6,
    "log_steps": 2,
    "ckpt_steps": 3,
    "input.data.context": 24,
    "input.data.limit": 400,
    "model.width": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.mlp_dim": 16,
    "evals.validation.data.context": 24,
    "evals.validation.data.limit": 21,
    "evals.validation.log_steps": 3,
}
TEXT = {**LM_TINY, "model.depth": 1, "document_mask": True, "z_loss": 1e-4}


def load_params(source):
    """Load the parameters of a run or a checkpoint, the averaged ones if there are any, as a nested dict of arrays."""
    from dcvit.hub.source import find

    return unflatten_dict({name: tensor.read() for name, tensor in find(source).params.items()}, sep="/")


def train_once(tmp_path_factory, config, overrides):
    """Train a model as the command does, once for all workers of a test session; return the workdir."""
    from dcvit import cli, train

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder of the session, in which each worker has its own
    workdir, finished = root / f"{config}_workdir", root / f"{config}_workdir.finished"
    with (root / f"{config}_workdir.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            words = [f"--config.{key}={value}" for key, value in overrides.items()]
            with jax.numpy_dtype_promotion("standard"):
                assert cli.run(train.main, ["--config", config, "--workdir", str(workdir), *words]) == 0
            finished.touch()
    return workdir
