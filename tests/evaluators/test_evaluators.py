"""Code shared by evaluators: batches that the devices divide, and a timer without compilation and padding."""

import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from sources import ListSource, evaluation_data, mesh_of

from dcvit import evaluators
from dcvit.config import load as configs
from dcvit.config.values import replaced
from dcvit.errors import ConfigError
from dcvit.training.evaluation import make_evaluators

# 23 rows of tokens, as a language model reads them; two of them are unreadable.
ROWS = ListSource(
    [{"tokens": np.full(5, i, np.int32), "is_target": np.arange(5) > i % 5} for i in range(23)], corrupt=(3, 22)
)


@pytest.mark.parametrize(("batch", "devices", "size"), [(7, 1, 7), (9, 8, 16), (64, 8, 64)])
def test_batches_hold_every_readable_example_once_and_divide_by_the_devices(batch, devices, size):
    found = list(evaluators.batches(evaluation_data(ROWS, mesh_of(devices), "skip"), "", batch))
    assert {len(b["tokens"]) for b in found} == {size}
    real = np.concatenate([b["tokens"][b["_mask"] > 0, 0] for b in found])
    assert real.tolist() == [i for i in range(23) if i not in (3, 22)]


def test_timer_excludes_compilation_which_happens_once(monkeypatch):
    """The clock of this test advances by 100 s while the function is compiled and by 1 s per batch."""
    clock, traces = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def first_tokens(params, batch):
        clock[0] += 100
        traces.append(1)
        return batch["tokens"][:, 0] + params["shift"]

    timed = evaluators.TimedFunction(first_tokens, mesh_of(1), 8)
    for batch in evaluators.batches(evaluation_data(ROWS, corrupt="skip"), "", 8):
        timed({"shift": jnp.int32(0)}, batch)
        clock[0] += 1
    assert len(traces) == 1
    assert (timed.seconds, timed.examples) == (2.0, 21)  # the last result is 2 s after the compilation
    assert timed.rate() == 10.5


def test_an_evaluator_is_a_file_that_states_its_kind_of_models():
    folder = Path(evaluators.__file__).parent
    assert {*evaluators.NAMES} == {path.stem for path in folder.glob("*.py")} - {"__init__"}
    evals = {"x": {"type": "perplexity", "data": {"kind": "digits", "split": "test"}, "pp": ""}}
    config = replaced(configs.load("vit_digits"), evals=ConfigDict(evals))
    with pytest.raises(ConfigError, match=r"evals\.x\.type='perplexity' is for model_name='lm', found 'vit'"):
        make_evaluators(config, lambda *_: None, mesh_of(1))
