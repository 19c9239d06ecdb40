"""Code shared by evaluators: batches that the devices divide, and a timer without compilation and padding."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
from sources import ListSource, mesh_of

import input_pipeline
from dcvit import evaluators

# 23 rows of tokens, as a language model reads them; two of them are unreadable.
ROWS = ListSource(
    [{"tokens": np.full(5, i, np.int32), "is_target": np.arange(5) > i % 5} for i in range(23)], corrupt=(3, 22)
)


@pytest.mark.parametrize(("batch", "devices", "size"), [(7, 1, 7), (9, 8, 16), (64, 8, 64)])
def test_batches_hold_every_readable_example_once_and_divide_by_the_devices(batch, devices, size):
    corrupt = input_pipeline.CorruptPolicy("skip")
    found = list(evaluators.batches(ROWS, "", batch, mesh_of(devices), corrupt))
    assert {len(b["tokens"]) for b in found} == {size}
    real = np.concatenate([b["tokens"][b["_mask"] > 0, 0] for b in found])
    assert real.tolist() == [i for i in range(23) if i not in (3, 22)]


def test_timer_excludes_compilation_which_happens_once(monkeypatch):
    """The clock of this test advances by 100 s while the function is compiled and by 1 s per batch."""
    clock, traces = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    policy = input_pipeline.CorruptPolicy("skip")

    def first_tokens(params, batch):
        clock[0] += 100
        traces.append(1)
        return batch["tokens"][:, 0] + params["shift"]

    timed = evaluators.TimedFunction(first_tokens, mesh_of(1), 8)
    for batch in evaluators.batches(ROWS, "", 8, mesh_of(1), policy):
        timed({"shift": jnp.int32(0)}, batch)
        clock[0] += 1
    assert len(traces) == 1
    assert (timed.seconds, timed.examples) == (2.0, 21)  # the last result is 2 s after the compilation
    assert timed.rate() == 10.5
