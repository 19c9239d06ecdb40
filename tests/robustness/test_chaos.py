"""A run that is interrupted at random moments has the result of an uninterrupted one, bit for bit."""

import chaos
import pytest


@pytest.mark.weekly
@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_run_has_the_result_of_an_uninterrupted_one(processes):
    kills = 3 - processes  # half a minute passes until the other process notices it
    lost, wrong = chaos.compare(processes=processes, kills=kills, terms=1, interrupts=1, seed=3)
    assert (lost["SIGTERM"], lost["SIGINT"], wrong) == (0, 0, [])
