"""Progress on the console, in lines."""

import logging
import re
import threading

import pytest

from dcvit.parallel import multihost
from dcvit.runs import progress
from dcvit.runs.progress import RunProgress

TIMING = {"examples_per_second": 100.0, "step_seconds": 0.5, "mfu": 0.25}


@pytest.mark.parametrize("announce", [True, False])
def test_a_stage_is_named_and_its_time_is_shown_until_it_ends(announce, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    lines, timed = [], threading.Event()

    def show(line):
        lines.append(line)
        if line != "compiling":
            timed.set()

    with progress.stage("compiling", show, announce=announce):
        assert timed.wait(60)
    assert (lines[0] == "compiling") is announce
    assert all(re.fullmatch(r"compiling: \d+ s", line) for line in lines[announce:])
    assert not any(thread.name == "stage" for thread in threading.enumerate())


def test_logged_step_is_a_line_with_speed_and_a_line_for_each_evaluation(capsys):
    metrics = {"loss": 1.23456, "lr": 0.1, "test/top1": 0.5, "test/n": 360, "val/loss": None}
    with RunProgress(10, rate=("tok/s", 2)) as shown:
        shown.report(4, metrics, TIMING)
        shown.report(6, {"loss": None}, {})
        shown.total = 1_728_006
        shown.report(6, {"loss": 1.0}, {**TIMING, "mfu": 0.5})
    assert capsys.readouterr().out.splitlines() == [
        "step 4/10  loss 1.2346  200 tok/s  500.0 ms/step  MFU 25.0%  ETA 0:00:03",
        "step 4  test: top1 0.5000  n 360",
        "step 4  val: loss None",
        "step 6/1728006  loss 1.0000  200 tok/s  500.0 ms/step  MFU 50.0%  ETA 10 days, 0:00:00",
    ]


def test_progress_is_a_line_after_a_while(capsys):
    shown = progress.Progress("tokenizing", in_bytes=True)
    shown.show(1, 2)
    shown.started, shown.shown = shown.started - 20, shown.shown - 20
    shown.show(5_000_000, 10_000_000, "9 tok/s")
    shown.show(6_000_000)
    assert capsys.readouterr().err == "tokenizing: 5 of 10 MB  9 tok/s  ETA 0:00:20\n"


def test_warnings_of_another_process_are_on_stderr(monkeypatch, capsys):
    """Its stdout is discarded."""
    monkeypatch.setattr(multihost, "is_first", lambda: False)
    with RunProgress(1):
        logging.getLogger("dcvit.dcmha").info("a choice")
        logging.getLogger("dcvit.dcmha").warning("a warning")
    printed = capsys.readouterr()
    assert printed.err == "a warning\n"
    assert "a warning" not in printed.out
