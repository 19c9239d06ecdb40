"""Names of workdirs: every printable character is written and read back, or refused in one line."""

import string

import jax.numpy as jnp
import pytest

from dcvit.errors import ConfigError
from dcvit.runs import restoring
from dcvit.runs.checkpointer import Checkpointer
from dcvit.runs.files import check_name, folder

PATTERN = "*?[\\"  # characters of a glob
PRINTABLE = [c for c in string.printable if c.isprintable() and c != "/"]


def check_round_trip(workdir, value):
    """Save a parameter in a workdir, and read it back by each of the libraries that read checkpoints."""
    items = {"params": {"x": jnp.full((3,), value)}, "rest": {"step": jnp.asarray(1)}}
    check_name(workdir)
    checkpointer = Checkpointer(workdir)
    checkpointer.save(1, items, {"config": {}, "row": {}})
    checkpointer.close()
    checkpoint = workdir / "checkpoints" / "1"
    assert restoring.latest(workdir) == 1
    assert restoring.restore(checkpoint, items)["params"]["x"][0] == value
    assert restoring.open_params(checkpoint)["x"].read().result()[0] == value


def test_local_names_mean_themselves(tmp_path):
    names = [
        "".join(c for c in PRINTABLE if c not in PATTERN),
        "lr%3D0.1",
        "lr=0.1",
        "mix#1",
        "mix",
        "é日本",
        " a ",
        "~a",
    ]
    for value, name in enumerate(names):
        check_round_trip(folder(str(tmp_path / name)), value)
    for value, name in enumerate(names):
        opened = restoring.open_params(tmp_path / "mix" / ".." / name / "checkpoints" / "1")
        assert opened["x"].read().result()[0] == value


@pytest.mark.parametrize("character", PATTERN)
def test_patterns_are_refused_as_local_names(tmp_path, character):
    with pytest.raises(ConfigError, match="a run cannot be saved to a path with"):
        check_name(tmp_path / f"x{character}y" / "run")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_urls_with_a_character_that_a_library_would_interpret_are_refused(scheme):
    refused = [f"x{c}y" for c in PRINTABLE if not c.isalnum() and c not in " -_.,=+@()"]
    for name in [*refused, "..", ".", "a ", "%3D", "é", "a\tb", "../other/x", "a//b"]:
        with pytest.raises(ValueError, match="in a URL should be of"):
            folder(f"{scheme}://bucket/{name}")
    for bucket in ("", "user:password@bucket", "Bad Bucket!"):
        with pytest.raises(ValueError, match=f"expected {scheme}://BUCKET/FOLDER, with a bucket of") as error:
            folder(f"{scheme}://{bucket}/x")
        assert "password" not in str(error.value)


@pytest.mark.exhaustive
def test_accepted_names_of_a_store_mean_themselves(object_store):
    for value, name in enumerate(["a -_.,=+@()b", "x"]):
        check_round_trip(folder(f"{object_store.bucket}/{name}"), value)
