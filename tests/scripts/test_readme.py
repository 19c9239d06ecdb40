"""The README is short, its commands run, its snippet works, its files exist, and its tables are measured results."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markdown_pages import ROOT, blocks, commands, run_commands

PAGE = ROOT / "README.md"
README = PAGE.read_text()
MARKER = "<!-- run by tests/scripts/test_readme.py -->"


@pytest.mark.weekly
def test_its_commands_run_as_written(tmp_path, monkeypatch, library_promotion):
    (block,) = blocks(PAGE, "bash", MARKER)
    run_commands(commands(block), tmp_path, monkeypatch)
    assert all((tmp_path / name).exists() for name in ("explore.html", "runs/report.html"))
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


@pytest.mark.parametrize("table", ["demo", "stdlib"])
def test_its_tables_are_what_the_demos_printed(table):
    for row in json.loads((ROOT / "docs" / f"{table}.json").read_text()):
        assert "| " + " | ".join(map(str, row.values())) + " |" in README


def results(name):
    return csv.DictReader((ROOT / "docs" / "reproduction" / f"{name}.csv").read_text().splitlines())


def test_its_evidence_is_that_of_the_benchmarks():
    forms = {row["form"]: row for row in results("tasks_confirmed")}
    best = max(("mha", "mha, wider", "grouped, K=2"), key=lambda form: float(forms[form]["accuracy %"]))
    cells = [f"{float(forms[n]['accuracy %']):.1f} ± {float(forms[n]['± 95 %']):.1f}" for n in ("dcmha, post", best)]
    assert f"at equal time, accuracy (%) | **{cells[0]}** | {cells[1]} |" in README
    assert forms["dcmha, post"]["verdict"] == "gain"
    rows = {row["arm"]: row for row in json.loads((ROOT / "docs" / "synthetic.json").read_text())["rows"]}
    complete, plain = (f"{rows[arm]['mean']:.1f} ± {rows[arm]['interval']:.1f}" for arm in ("complete", "plain"))
    assert f"| **{complete}** | {plain} | 2,000 steps," in README
    text = [row["result"].removesuffix(" bits per byte") for row in json.loads((ROOT / "docs/stdlib.json").read_text())]
    assert f"| **{text[0].replace(' ', '** ', 1)} | {text[1]} | 600 steps" in README
    images = {row["model"]: row for row in results("table8")}
    ours, plain_vit = (images[f"{name} on digits"] for name in ("DCViT", "ViT"))
    cells = [f"{float(row['top-1 %']):.1f} ± {float(row['± 95 %']):.1f}" for row in (ours, plain_vit)]
    assert f"| {cells[0]} | {cells[1]} |" in README
    plain_scenes, scenes = (f"{float(r['top-1 %']):.1f} ± {float(r['± 95 %']):.1f}" for r in results("image_scenes"))
    assert f"| {scenes} | **{plain_scenes}** |" in README
    for epochs, gain in ((90, "+2.8"), (300, "+0.3")):
        column = f"ImageNet-1k, {epochs} epochs, paper"
        assert f"{float(ours[column]) - float(plain_vit[column]):+.1f}" == gain
        assert f"Table 8: {gain} points" in README
