"""The README is a promise: its commands run, its snippet is a module, its files exist, its numbers hold."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


RUN_HERE = re.findall(r"^<!-- run by tests/test_readme.py -->\n```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_every_command_by_hand_runs_as_written(tmp_path):
    """In a folder with the clone's configs and images, with the environment's commands on PATH, as after activation."""
    (commands,) = RUN_HERE
    for name in ("configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands.strip().splitlines():
        done = subprocess.run(
            shlex.split(command), cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert (tmp_path / "runs/both.png").exists()


def test_every_other_command_is_one_that_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text()
    for block in blocks("bash"):
        for command in [] if block in RUN_HERE else block.strip().splitlines():
            assert command in ci, f"{command} is run by nothing"


def test_the_snippet_is_a_working_block():
    snippet, *_ = blocks("python")
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    out, variables = names["Block"]().init_with_output(jax.random.key(1), x)
    assert out.shape == x.shape
    assert {"pre", "post"} <= variables["params"]["Attention_0"].keys()
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    grads = jax.grad(lambda p: jnp.sum(names["Block"]().apply(p, x) ** 2))(variables)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_every_file_it_names_exists():
    for name in re.findall(r"`((?:dcvit|configs|scripts|tests|docs|input_pipeline)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\((?!http|#)([^)]+)\)", README):
        assert (ROOT / name).exists(), name
    (tree,) = re.findall(r"^## Map\n\n```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = re.findall(r"[\w/]+\.(?:py|sh|sbatch)\b", tree)
    assert len(named) > 20
    for name in named:
        assert any(f"/{file}".endswith(f"/{name}") for file in files), f"the map names {name}"


@pytest.mark.parametrize("table", ["digits", "stdlib"])
def test_its_tables_are_what_the_demos_printed(table):
    for row in json.loads((ROOT / "docs" / f"{table}.json").read_text()):
        assert "| " + " | ".join(map(str, row.values())) + " |" in README


def test_its_input_table_is_what_the_benchmark_measured():
    sys.path.insert(0, str(ROOT / "scripts"))
    import bench_input

    for line in bench_input.lines(json.loads((ROOT / "docs" / "input.json").read_text())):
        assert line in README


def test_its_table_of_tpu_slices_is_what_the_compiler_said():
    """Every model that the configs recommend a slice for, all of which fit."""
    from dcvit import aot
    from dcvit import config as configs

    rows = json.loads((ROOT / "docs" / "aot.json").read_text())
    assert "\n".join(aot.markdown(rows)) in README
    assert [(row["config"], row["topology"]) for row in rows] == configs.recommended()
    assert {row["verdict"] for row in rows} == {"fits"}
