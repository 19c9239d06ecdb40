"""Checkpoints are verified before they are loaded, kept as configured, and never left incomplete under their name."""

import json
import os
import resource
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.checkpoint import checksums
from dcvit.checkpoint.checkpointer import Checkpointer, load_params, saved_steps
from dcvit.errors import CheckpointError

TREE = {
    "params": {"a": {"kernel": np.arange(12.0, dtype=np.float32).reshape(3, 4)}, "b": np.ones(3, np.float32)},
    "rest": {"step": np.int32(0), "opt_state": [np.zeros((3, 4), jnp.bfloat16), {"count": np.int32(7)}]},
}


def tree(step):
    return jax.tree.map(lambda x: jnp.asarray(x + np.asarray(step, x.dtype)), TREE)


def save(workdir, *steps, **options):
    checkpoints = Checkpointer(workdir, **{"keep": 9, **options})
    for step in steps:
        checkpoints.save(step, tree(step), {"row": {"loss": step / 3}})
    checkpoints.close()
    return checkpoints


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != checksums.NAME]
    return max(files, key=lambda path: path.stat().st_size)


def test_what_was_saved_comes_back_bit_for_bit_with_what_was_said_about_it(tmp_path):
    checkpoints = save(tmp_path, 3)
    assert checkpoints.latest() == 3
    found = checkpoints.restore(3, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree(3)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree(3)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert checkpoints.about(3) == {"step": 3, "row": {"loss": 1.0}}


def test_the_seal_is_of_sha256sum(tmp_path):
    save(tmp_path, 3)
    folder = tmp_path / "checkpoints" / "3"
    names = {line.split("  ", 1)[1] for line in (folder / checksums.NAME).read_text().splitlines()}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == there - {checksums.NAME}
    assert os.system(f"cd {folder} && sha256sum --quiet --strict --check {checksums.NAME}") == 0


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 1}, [6]),
        ({"keep": 2}, [5, 6]),
        ({"keep": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep": 9}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_every_so_many_stay(tmp_path, options, kept):
    save(tmp_path, 1, 2, 3, 4, 5, 6, **options)
    assert saved_steps(tmp_path) == kept


def test_the_best_stays_until_a_better_one_is_saved(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=1)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2)):
        checkpoints.save(step, tree(step), {}, best=best)
        checkpoints.wait()
        assert saved_steps(tmp_path) == sorted({best, step})
    checkpoints.close()


def test_what_a_kill_left_unfinished_is_removed_and_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    left = [
        folder / "2.orbax-checkpoint-tmp",
        folder / "2.orbax-checkpoint-tmp-sealing",
        folder / "2.orbax-checkpoint-tmp-17",
    ]
    for path in left:
        shutil.copytree(folder / "1", path)
    assert saved_steps(tmp_path) == [1]
    assert Checkpointer(tmp_path).latest() == 1
    assert [path.exists() for path in left] == [False] * 3


def test_a_damaged_one_is_named_and_the_intact_one_offered_or_taken(tmp_path, capsys):
    save(tmp_path, 1, 2, 3)
    folder = tmp_path / "checkpoints"
    for step in (2, 3):
        flip(damaged := largest(folder / str(step)))
    with pytest.raises(CheckpointError, match=damaged.name) as error:
        Checkpointer(tmp_path, keep=9).latest("fail")
    assert f"checkpoint {folder / '3'} is damaged" in str(error.value)
    assert f"newest intact earlier one is {folder / '1'}; --config.on_corrupt=previous" in str(error.value)
    assert saved_steps(tmp_path) == [1, 2, 3]
    assert Checkpointer(tmp_path, keep=9).latest("previous") == 1
    assert saved_steps(tmp_path) == [1]
    assert sorted(path.name for path in folder.glob("*damaged*")) == ["2.damaged-1", "3.damaged-1"]
    assert capsys.readouterr().err.count("is damaged") == 2


def test_a_run_does_not_begin_anew_because_its_checkpoints_are_bad(tmp_path):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        flip(largest(tmp_path / "checkpoints" / str(step)))
    for policy in ("fail", "previous", "previous"):
        with pytest.raises(CheckpointError, match="no earlier one is intact, and the run does not begin anew"):
            Checkpointer(tmp_path).latest(policy)
    assert saved_steps(tmp_path) == [1, 2]


DAMAGE = {
    "an empty seal": lambda folder: (folder / checksums.NAME).write_text(""),
    "no seal": lambda folder: (folder / checksums.NAME).unlink(),
    "a file more": lambda folder: (folder / "params" / "d" / "foreign").write_text("x"),
    "a pipe for a file": lambda folder: (largest(folder).unlink(), os.mkfifo(folder / "params" / "pipe")),
    "a pipe in place of a file": lambda folder: pipe(largest(folder / "params")),
    "a link to nowhere": lambda folder: link(largest(folder / "params")),
    "an empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "a seal of another step": lambda folder: shutil.copy(folder.parent / "1" / checksums.NAME, folder),
    "a seal that is no text": lambda folder: (folder / checksums.NAME).write_bytes(b"\xff\xfe" * 50),
}


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def link(path):
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("damage", DAMAGE)
def test_other_damage_is_found_without_waiting(tmp_path, damage):
    save(tmp_path, 1, 2)
    DAMAGE[damage](tmp_path / "checkpoints" / "2")
    with pytest.raises(CheckpointError, match="is damaged"):
        Checkpointer(tmp_path).latest()
    with pytest.raises(CheckpointError):
        load_params(tmp_path)


def test_parameters_load_though_the_optimiser_is_damaged_and_not_the_other_way_round(tmp_path):
    save(tmp_path, 1, 2)
    flip(largest(tmp_path / "checkpoints" / "2" / "rest"))
    found = load_params(tmp_path)
    np.testing.assert_array_equal(found["b"], 3 * np.ones(3, np.float32))
    flip(damaged := largest(tmp_path / "checkpoints" / "2" / "params"))
    with pytest.raises(CheckpointError, match=damaged.name) as error:
        load_params(tmp_path)
    assert f"intact is --checkpoint {tmp_path / 'checkpoints' / '1'}" in str(error.value)


def test_another_models_state_is_refused_by_name(tmp_path):
    checkpoints = save(tmp_path, 1)
    other = {**tree(1), "rest": {**tree(1)["rest"], "more": jnp.zeros(2)}}
    with pytest.raises(CheckpointError, match="1 only in the model: more"):
        checkpoints.restore(1, other)


def save_and_wait(checkpoints, items):
    checkpoints.save(2, items, {})
    checkpoints.wait()


def test_a_full_disk_leaves_the_newest_checkpoint_and_nothing_else(tmp_path):
    """A limit of a file's size stands in for a disk's: the write fails in the middle, in the same way."""
    save(tmp_path, 1)
    big = {"params": {"w": jax.random.normal(jax.random.key(0), (300, 1000))}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpointer(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match=f"cannot save step 2 to {tmp_path}/checkpoints: File too large"):
            save_and_wait(checkpoints, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    checkpoints = Checkpointer(tmp_path)
    assert checkpoints.latest() == 1
    checkpoints.save(2, big, {})
    checkpoints.close()
    assert checkpoints.latest() == 2


def test_a_save_does_not_see_what_training_does_to_the_arrays_after(tmp_path):
    """Training gives the arrays' memory to the next step while they are still being written."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros((500, 1000))
    checkpoints = Checkpointer(tmp_path, keep=99)
    for number in range(1, 30):
        array = step(array)
        if number % 10 == 0:
            checkpoints.save(number, {"params": {"x": array}}, {})
    checkpoints.close()
    for number in saved_steps(tmp_path):
        assert (np.asarray(load_params(tmp_path / "checkpoints" / str(number))["x"]) == number).all()


def test_checkpoints_are_readable_by_others_as_the_umask_says(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "1"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((folder / checksums.NAME).stat().st_mode) == 0o666 & ~mask
    assert json.loads((folder / "about" / "metadata").read_text())["step"] == 1
