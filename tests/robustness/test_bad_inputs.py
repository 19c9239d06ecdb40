"""Bad inputs end in one line that states the facts, with the documented exit status, and change nothing on disk.

One table of mistakes that people make in configs, data, checkpoints and command lines, all run in this process.
"""

import contextlib
import functools
import re
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from bad_inputs import BAD_INPUTS
from ml_collections import ConfigDict
from workspace import Workspace

from dcvit.__main__ import dispatch
from dcvit.cli import run
from dcvit.training import setup, step
from input_pipeline import tfrecord


@pytest.fixture
def workspace(tmp_path, digits_workdir, lm_workdir):
    with contextlib.ExitStack() as stack, jax.numpy_dtype_promotion("standard"):
        yield Workspace(tmp_path, {"vit": digits_workdir, "lm": lm_workdir}, stack)


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """Trace each model, and build the setup of each valid config, once: this takes most of the time of most rows."""
    shapes, make, made = functools.cache(setup.param_shapes), setup.make_setup, {}

    def make_once(config: ConfigDict, **options: Path) -> setup.Setup:
        key = config.to_json()
        if key not in made:
            made[key] = make(config, **options)
        return made[key]

    def zeros(run: setup.Setup, key: jax.Array) -> setup.Params:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes(run.model.module, run.task.example))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "param_shapes", shapes)
        patch.setattr(setup, "make_setup", make_once)
        patch.setattr(step, "init_params", zeros)
        yield


@pytest.fixture(scope="module")
def compiled():
    """The names of the programs that XLA compiled, or JAX read from its cache on disk, since the first test."""
    names: list[str] = []

    def listen(event: str, seconds: float, **about: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run except the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def mentions(line: str, fact: str) -> bool:
    """True if a line contains a text that is not part of a longer word."""
    start = r"(?<![\w+-])" if re.match(r"[\w+-]", fact) else ""
    end = r"(?![\w+-])" if re.search(r"[\w+-]$", fact) else ""
    return re.search(f"{start}{re.escape(fact)}{end}", line) is not None


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_line_with_its_facts_and_changes_nothing(name, workspace, compiled, capsys):
    tfrecord._log_indexing.cache_clear()  # its notice is printed once per process
    row = BAD_INPUTS[name]
    argv = row.argv(workspace)
    before = {copy: contents(copy) for copy in workspace.copies.values()}
    compiled_before = len(compiled)
    capsys.readouterr()
    status = run(dispatch, argv)
    out, err = capsys.readouterr()
    assert status == row.status, err
    assert err.endswith("\n")
    *notices, line = err.splitlines()
    assert line.startswith("error: "), err
    assert bool(notices) == (row.notice is not None), err
    assert all(row.notice in notice for notice in notices), err
    assert [fact for fact in row.facts if not mentions(line, fact)] == [], line
    assert "Traceback" not in out + err
    assert "unpickled" not in out
    assert workspace.new.exists() == row.starts
    assert row.starts or compiled[compiled_before:] == []
    for copy, content in before.items():
        assert contents(copy) == content
