"""The README is short, its commands run and print what it shows, its snippet works, its results are measured."""

import csv
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markdown_pages import ROOT, blocks, commands, run_commands

PAGE = ROOT / "README.md"
README = PAGE.read_text()
MARKER = "<!-- run by tests/scripts/test_readme.py -->"


@pytest.mark.weekly
def test_its_commands_run_and_print_what_it_shows(tmp_path, monkeypatch, capsys, library_promotion):
    """Numbers vary between processors, so that lines are compared without them."""
    (block,) = blocks(PAGE, "bash", MARKER)
    run_commands(commands(block), tmp_path, monkeypatch)
    assert all((tmp_path / name).exists() for name in ("explore.html", "runs/report.html"))
    (shown,) = blocks(PAGE, "text", "<!-- printed by the commands above -->")
    printed = re.sub(r"[\d.,]+", "0", "".join(capsys.readouterr()))
    assert [line for line in re.sub(r"[\d.,]+", "0", shown).splitlines() if line not in printed] == []
    (snippet,) = blocks(PAGE, "python", MARKER)
    exec(compile(snippet, "README.md", "exec"), {})


def test_ci_runs_its_other_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    for block in blocks(PAGE, "bash"):
        for command in [] if block in blocks(PAGE, "bash", MARKER) else commands(block):
            assert command in ci, f"{command} is run by nothing"


@pytest.mark.slow
def test_its_snippet_is_a_working_block():
    _, snippet = blocks(PAGE, "python")
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    block = names["Block"]()

    @jax.jit
    def results(x):
        y, variables = block.init_with_output(jax.random.key(1), x)
        return y, jax.grad(lambda v: jnp.sum(block.apply(v, x) ** 2))(variables)

    y, gradients = results(x)
    assert y.shape == x.shape
    assert {"pre", "post"} <= gradients["params"]["DCMHA_0"].keys()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_the_results_of_its_tables_are_rows_of_the_evidence():
    """Means with intervals, and smallest and largest values, of this package's runs."""
    with (ROOT / "docs" / "evidence.csv").open(newline="") as file:
        rows = [(row["result"], row["interval"]) for row in csv.DictReader(file)]
    known = {f"{float(x):.1f} ± {float(width):.1f}" for x, width in rows if re.fullmatch(r"[\d.]+", width)}
    known |= {f"{x} ({width})" for x, width in rows if "–" in width}
    shown = re.findall(r"[\d.]+ ± [\d.]+|[\d.]+ \([\d.]+–[\d.]+\)", README.replace("**", ""))
    assert len(shown) >= 10
    assert {*shown} <= known
