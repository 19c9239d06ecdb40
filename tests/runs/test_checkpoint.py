"""Checkpoints are verified before they are loaded, kept as configured, and never left incomplete under their name."""

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trained_workdirs import load_params

from dcvit.errors import CheckpointError
from dcvit.runs import checksums, files, restoring, steps
from dcvit.runs.checkpointer import Checkpointer
from dcvit.runs.steps import saved_steps

TREE = {
    "params": {"a": {"kernel": np.arange(12.0, dtype=np.float32).reshape(3, 4)}, "b": np.ones(3, np.float32)},
    "rest": {"step": np.int32(0), "opt_state": [np.zeros((3, 4), jnp.bfloat16), {"count": np.int32(7)}]},
}


def tree(step):
    return jax.tree.map(lambda x: jnp.asarray(x + np.asarray(step, x.dtype)), TREE)


def save(workdir, *numbers, **options):
    checkpointer = Checkpointer(workdir, **{"keep": 9, **options})
    for step in numbers:
        checkpointer.save(step, tree(step), {"row": {"loss": step / 3}})
    checkpointer.close()
    return checkpointer


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A workdir with checkpoints of steps 1, 2 and 3, which tests copy."""
    workdir = tmp_path_factory.mktemp("three")
    save(workdir, 1, 2, 3)
    return workdir


@pytest.fixture
def workdir(three, tmp_path):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    return tmp_path


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != checksums.NAME]
    return max(paths, key=lambda path: path.stat().st_size)


@pytest.mark.slow
def test_restored_arrays_are_bitwise_equal_and_about_is_returned(three):
    assert restoring.latest(three) == 3
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree(3))
    found = restoring.restore(three / "checkpoints/3", like)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree(3)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert steps.about(three / "checkpoints/3") == {"step": 3, "row": {"loss": 1.0}}


def test_checksums_are_verified_by_sha256sum(three):
    folder = three / "checkpoints" / "3"
    names = {line.split("  ", 1)[1] for line in (folder / checksums.NAME).read_text().splitlines()}
    existing = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == existing - {checksums.NAME}
    subprocess.run(["sha256sum", "--quiet", "--strict", "--check", checksums.NAME], cwd=folder, check=True)
    assert json.loads((folder / "about" / "metadata").read_text())["step"] == 3


def test_latest_best_and_periodic_steps_are_kept():
    for options, kept in (((1, None, None), [6]), ((2, 4, 1), [1, 4, 5, 6]), ((9, None, None), [1, 2, 3, 4, 5, 6])):
        removed = steps.steps_to_remove([0, 1, 2, 3, 4, 5, 6], *options)
        assert sorted({0, 1, 2, 3, 4, 5, 6} - {*removed}) == [0, *kept]  # that of step 0 is a converted model


def test_steps_are_removed_after_each_save_and_the_best_is_kept_until_a_better_one(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, keep_every=5)
    for step, best in ((1, 1), (2, 2), (3, 2), (5, 2), (6, 6)):
        checkpointer.save(step, tree(step), {}, best=best)
        checkpointer.wait()
        assert saved_steps(tmp_path) == sorted({best, step, *([5] if step > 5 else [])})
    checkpointer.close()


def test_incomplete_checkpoints_are_ignored_and_removed(workdir):
    folder = workdir / "checkpoints"
    incomplete = [folder / f"4{steps.TEMPORARY}{end}" for end in ("", "-checksums", "-17", "-removed")]
    for path in incomplete:
        shutil.copytree(folder / "1", path)
    assert saved_steps(workdir) == [1, 2, 3]
    Checkpointer(workdir).close()
    assert restoring.latest(workdir) == 3
    assert not any(path.exists() for path in incomplete)


def test_kill_while_a_checkpoint_is_removed_leaves_none_that_looks_complete(workdir, monkeypatch):
    monkeypatch.setattr(steps, "remove", lambda path: flip(largest(path)))  # stopped in the middle
    steps.remove_step(workdir / "checkpoints" / "2")
    assert saved_steps(workdir) == [1, 3]


def test_damaged_checkpoint_is_never_loaded_and_the_intact_one_is_named(workdir):
    folder = workdir / "checkpoints"
    for step in (3, 2):
        flip(damaged := largest(folder / str(step)))
        message = f"checkpoint {folder}/3 is damaged: .*; {folder}/{step - 1} is intact"
        with pytest.raises(CheckpointError, match=message):
            restoring.latest(workdir)
    flip(largest(folder / "1"))
    with pytest.raises(CheckpointError, match=r"no earlier checkpoint is intact\. Remove .* to start from step 0"):
        restoring.latest(workdir)
    assert saved_steps(workdir) == [1, 2, 3]
    shutil.rmtree(folder / "3")
    with pytest.raises(CheckpointError, match=damaged.name):
        restoring.latest(workdir)


DAMAGE = {
    "empty checksums": lambda folder: (folder / checksums.NAME).write_text(""),
    "additional file": lambda folder: (folder / "params" / "d" / "foreign").write_text("x"),
    "checksums of another step": lambda folder: shutil.copy(folder.parent / "1" / checksums.NAME, folder),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_other_damage_is_found(workdir, damage):
    DAMAGE[damage](workdir / "checkpoints" / "3")
    with pytest.raises(CheckpointError, match="is damaged"):
        restoring.latest(workdir)
    with pytest.raises(CheckpointError):
        load_params(workdir)


def test_parameters_load_from_a_checkpoint_whose_optimizer_state_is_damaged(workdir):
    flip(largest(workdir / "checkpoints" / "3" / "rest"))
    found = load_params(workdir)
    np.testing.assert_array_equal(found["b"], 4 * np.ones(3, np.float32))
    flip(damaged := largest(workdir / "checkpoints" / "3" / "params"))
    with pytest.raises(CheckpointError, match=damaged.name) as error:
        load_params(workdir)
    assert f"use --checkpoint {workdir / 'checkpoints' / '2'}, which is intact" in str(error.value)


def test_state_of_another_model_is_refused_by_name(three):
    other = {**tree(1), "rest": {**tree(1)["rest"], "more": jnp.zeros(2)}}
    with pytest.raises(CheckpointError, match="1 only in the model: more"):
        restoring.restore(three / "checkpoints/1", other)
    with pytest.raises(CheckpointError, match="checkpoints/1 has no ema"):
        restoring.check_compatible(three / "checkpoints/1", {"ema": {}})


def save_and_wait(checkpointer, items):
    checkpointer.save(2, items, {})
    checkpointer.wait()


def test_full_disk_leaves_the_latest_checkpoint_and_nothing_else(tmp_path):
    """A limit on the size of files makes the write fail in the middle, as a full disk does."""
    save(tmp_path, 1)
    big = {"params": {"w": jax.random.normal(jax.random.key(0), (300, 1000))}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpointer = Checkpointer(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match=f"cannot save step 2 to {tmp_path}/checkpoints: File too large"):
            save_and_wait(checkpointer, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    checkpointer = Checkpointer(tmp_path)
    assert restoring.latest(tmp_path) == 1
    checkpointer.save(2, big, {})
    checkpointer.close()
    assert restoring.latest(tmp_path) == 2


def test_save_is_not_affected_by_later_donation_of_the_arrays(tmp_path):
    """The next training step reuses the memory of the arrays while they are written."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros((500, 1000))
    checkpointer = Checkpointer(tmp_path, keep=99)
    for number in range(1, 30):
        array = step(array)
        if number % 10 == 0:
            checkpointer.save(number, {"params": {"x": array}}, {})
    checkpointer.close()
    assert saved_steps(tmp_path) == [10, 20]
    for number in saved_steps(tmp_path):
        assert (np.asarray(load_params(tmp_path / "checkpoints" / str(number))["x"]) == number).all()


@pytest.mark.slow
def test_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "config.json"
    files.replace(path, "old")
    path.with_name("config.json.new").mkdir()  # makes the write fail
    with pytest.raises(OSError, match=r"config\.json"):
        files.replace(path, "new")
    assert path.read_text() == "old"


def test_description_of_another_form_is_refused_in_one_line(tmp_path):
    (tmp_path / "about").mkdir()
    (tmp_path / "about" / "metadata").write_text('{"step": 7, "seconds": null}')
    with pytest.raises(CheckpointError, match=f"cannot read {tmp_path}/about/metadata: 'seconds' is of type") as raised:
        steps.about(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_new_name_is_flushed_with_its_folder(tmp_path, monkeypatch):
    """After the rename; a power failure could otherwise bring the old name back."""
    flushed = []  # the entries of each flushed folder
    real = os.fsync

    def fsync(number):
        path = Path(f"/proc/self/fd/{number}").readlink()
        flushed.extend(str(entry.relative_to(tmp_path)) for entry in (path.iterdir() if path.is_dir() else ()))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, tree(1), {})
    checkpointer.close()
    assert "checkpoints/1" in flushed
    files.replace(tmp_path / "config.json", "{}")
    assert "config.json" in flushed
