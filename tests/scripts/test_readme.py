"""The README is short, its commands run, its snippet works, its files exist, and its tables are measured results."""

import json
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markdown_pages import ROOT, blocks, commands

from dcvit import __main__ as entry
from dcvit import cli

PAGE = ROOT / "README.md"
README = PAGE.read_text()
MARKER = "<!-- run by tests/scripts/test_readme.py -->"


def test_it_has_at_most_150_lines():
    assert len(README.splitlines()) <= 150


@pytest.mark.weekly
def test_its_commands_run_as_written(tmp_path, monkeypatch, library_promotion):
    """The commands run in a folder with the repository's configs and images."""
    (block,) = blocks(PAGE, "bash", MARKER)
    for name in ("configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for command in commands(block):
        program, *words = shlex.split(command)
        assert program == "dcvit"
        assert cli.run(entry.dispatch, words) == 0, command
    assert (tmp_path / "runs/curves.png").exists()
    (snippet,) = blocks(PAGE, "python", MARKER)
    exec(compile(snippet, "README.md", "exec"), {})


def test_ci_runs_its_other_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    for block in blocks(PAGE, "bash"):
        for command in [] if block in blocks(PAGE, "bash", MARKER) else commands(block):
            assert command in ci, f"{command} is run by nothing"


@pytest.mark.slow
def test_its_snippet_is_a_working_block():
    snippet = blocks(PAGE, "python")[-1]
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    block = names["Block"]()
    variables = jax.jit(block.init)(jax.random.key(1), x)
    assert {"pre", "post"} <= variables["params"]["DCMHA_0"].keys()
    assert jax.eval_shape(block.apply, variables, x).shape == x.shape
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    grads = jax.jit(jax.grad(lambda v: jnp.sum(block.apply(v, x) ** 2)))(variables)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("table", ["digits", "stdlib"])
def test_its_tables_are_what_the_demos_printed(table):
    for row in json.loads((ROOT / "docs" / f"{table}.json").read_text()):
        assert "| " + " | ".join(map(str, row.values())) + " |" in README


@pytest.mark.slow
def test_it_names_every_extra_that_a_user_installs():
    project = (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1], re.MULTILINE))
    for extra in re.findall(r'"\.\[(\w+)\]"', README):
        assert extra in extras
