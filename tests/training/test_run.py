"""Training as a call in Python: the rows, checkpoints and model of the command, and its errors as exceptions."""

import jax
import numpy as np
import pytest
from trained_workdirs import TINY

import dcvit
from dcvit import cli
from dcvit.train import main
from dcvit.training import train

pytestmark = pytest.mark.usefixtures("library_promotion")
SHORT = {**TINY, "total_steps": 2, "ckpt_steps": 1, "ckpt_keep": 2, "log_steps": 1, "evals.test.log_steps": 2}


@pytest.mark.slow
def test_a_call_has_the_result_of_the_command_and_resumes(tmp_path):
    nested = {key: value for key, value in SHORT.items() if not key.startswith("model.")}
    nested["model"] = {key.partition(".")[2]: value for key, value in SHORT.items() if key.startswith("model.")}
    run = train("vit_digits", tmp_path / "call", **nested)
    words = [f"--config.{key}={value}" for key, value in SHORT.items()]
    assert cli.run(main, ["--config", "vit_digits", "--workdir", str(tmp_path / "command"), *words]) == 0
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("call", "command")]
    assert files[0] == files[1]
    assert run.checkpoints == [1, 2]
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    model, other = run.load(), dcvit.load(tmp_path / "command")
    assert all(map(np.array_equal, *map(jax.tree.leaves, (model.params, other.params))))
    assert train("vit_digits", tmp_path / "call", **nested).metrics == run.metrics


@pytest.mark.slow
def test_a_function_receives_each_row_and_may_end_the_run_which_resumes(tmp_path):
    class StopError(Exception):
        pass

    def until(last):
        def on_row(step, row):
            rows[step] = row
            if step == last:
                raise StopError

        return on_row

    rows: dict = {}
    with pytest.raises(StopError):
        train("vit_digits", tmp_path / "run", on_row=until(1), **SHORT)
    assert [*rows] == [0, 1]
    run = train("vit_digits", tmp_path / "run", on_row=until(None), **SHORT)
    assert [{"step": step, **row} for step, row in rows.items()] == run.metrics
