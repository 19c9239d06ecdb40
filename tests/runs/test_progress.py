"""Progress on the console: lines without a terminal, log records above the bar, and estimated times."""

import logging
import re
import threading
import types

import pytest

from dcvit.parallel import multihost
from dcvit.runs import progress
from dcvit.runs.progress import ProgressBar, RunProgress

TIMING = {"examples_per_second": 100.0, "step_seconds": 0.5, "mfu": 0.25}


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal


def test_names_are_shown_literally_and_escaped(terminal, capsys):
    with RunProgress("[/red]:cat:\n", 10) as shown:
        shown.line("[/red]:cat:\n")
    out = capsys.readouterr().out
    assert out.count("[/red]:cat:\\n") >= 2


@pytest.mark.parametrize(("lines", "expected"), [(True, "reading: 500 of 1,000  fast  ETA "), (False, "")])
def test_bar_is_lines_or_nothing_elsewhere(monkeypatch, capsys, lines, expected):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with ProgressBar("reading", 1000, lines=lines) as bar:
        bar.show(500, status="fast")
        assert not bar.live
    out, err = capsys.readouterr()
    assert (out, err.partition("ETA ")[0] + "ETA " * bool(err)) == ("", expected)


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
    with RunProgress("run", 10, rate=("tok/s", 2)) as shown:
        shown.report(4, metrics, TIMING)
        shown.report(6, {"loss": None}, {})
    assert capsys.readouterr().out.splitlines() == [
        "step 4/10  loss 1.2346  200 tok/s  500.0 ms/step  MFU 25.0%  ETA 3s",
        "step 4  test: top1 0.5000  n 360",
        "step 4  val: loss None",
    ]


@pytest.fixture
def clock(monkeypatch):
    """A clock of seconds that only a test advances, in a process that has estimated no run."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(progress, "_estimated", set())
    return now


def estimates(clock, capsys, *, total, start=0, seconds_per_step=60.0, title="run"):
    """The lines about the estimated time of a run that logs every 10 steps, after a compilation of an hour."""
    with RunProgress(title, total, start) as shown:
        clock.seconds += 3600
        for step in range(start + 10, min(start + 100, total) + 1, 10):
            clock.seconds += 10 * seconds_per_step
            shown.report(step, {"loss": 1.0}, TIMING)
            shown.report(step, {"val/loss": 1.0}, {})
            if step < start + 30:
                assert "estimated" not in (out := capsys.readouterr().out), out
    return [line for line in capsys.readouterr().out.splitlines() if "estimated" in line]


def test_estimated_time_of_a_long_run_is_reported_once_also_if_it_is_resumed(clock, capsys):
    assert estimates(clock, capsys, total=14400) == [
        "estimated time: 10.0 days for 14,400 steps; fewer steps, a smaller model, or more or faster devices reduce it"
    ]
    assert estimates(clock, capsys, total=14400, start=100) == []
    assert estimates(clock, capsys, total=14400, title="another") != []


@pytest.mark.slow
def test_live_display_shows_steps_and_log_records_and_restores_the_handlers(terminal, capsys):
    logger, handler = logging.getLogger("dcvit"), logging.NullHandler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    try:
        with RunProgress("run", 10, start=2) as shown:
            assert shown.bar.tasks[0].completed == 2
            shown.advance(5)
            assert shown.bar.tasks[0].completed == 5
            logging.getLogger("dcvit.training.progress").warning("step 5: the loss is nan; skipped")
            assert logger.handlers != [handler]
        assert (logger.handlers, logger.level, logger.propagate) == ([handler], *before)
    finally:
        logger.removeHandler(handler)
    out, err = capsys.readouterr()
    assert out.count("step 5: the loss is nan; skipped") == 1
    assert not err


def test_warnings_of_another_process_are_on_stderr(monkeypatch, capsys):
    """Its stdout is discarded."""
    monkeypatch.setattr(multihost, "is_first", lambda: False)
    with RunProgress("run", 1):
        logging.getLogger("dcvit.dcmha").info("a choice")
        logging.getLogger("dcvit.dcmha").warning("a warning")
    printed = capsys.readouterr()
    assert printed.err == "a warning\n"
    assert "a warning" not in printed.out
