"""Tasks of lm-evaluation-harness: loading them, running them on a model, and tables of their results.

The library `lm_eval` is imported inside the functions, because `prepare` must set environment variables before.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from dcvit.errors import ConfigError, first_line

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
# Resamples of the bootstrap, for metrics whose standard error has no formula. The harness's 100,000 take minutes.
RESAMPLES = 1000

Library: TypeAlias = Any  # an object of a class of `lm_eval`, or the `HarnessModel`, which imports it
Results = dict[str, Any]  # the library's results


def prepare(online: bool) -> None:
    """Set the environment variables that lm-evaluation-harness and its libraries read when they are imported.

    Args:
      online: allow downloads of data that is not in the local cache.

    Raises:
      ConfigError: the library is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError('this needs lm_eval, which is not installed: pip install "dcvit[eval]"')
    os.environ["DISABLE_MULTIPROC"] = "1"  # a process with JAX's threads should not fork
    if not online:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))


def evaluate_tasks(
    make_model: Callable[[], Library],
    names: Sequence[str],
    *,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
) -> Results:
    """Run tasks on a model and return the library's results.

    Args:
      make_model: function that returns the model; called after the tasks were loaded.
      names: names of tasks, groups or tags.
      include_path: a folder of further task files, which may run code.
      num_fewshot: the number of examples before each question; by default the tasks decide.
      limit: the maximum number of questions of each task.

    Raises:
      ConfigError: a task is unknown or not supported, or its data is missing.
    """
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    try:
        tasks = load_tasks(TaskManager(include_path=include_path and str(include_path)), names)
        from lm_eval import simple_evaluate

        model = make_model()
        with contextlib.redirect_stdout(sys.stderr):  # the library prints to stdout
            results: Results = simple_evaluate(
                model, tasks=tasks, num_fewshot=num_fewshot, limit=limit, log_samples=False,
                bootstrap_iters=RESAMPLES, batch_size=model.batch_size,
            )  # fmt: skip
        return results
    except TemplateError as e:
        raise ConfigError(f"a task's template: {first_line(e)}") from None


def load_tasks(manager: Library, names: Iterable[str]) -> list[Library]:
    """Load tasks and groups of tasks by name, with their data, and return them.

    Raises:
      ConfigError: an unknown name, or a task that cannot be loaded or is not supported.
    """
    loaded: list[Library] = []
    valid_names = set(manager.all_tasks)
    for name in names:
        if name not in valid_names:
            close = difflib.get_close_matches(name, valid_names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`lm_eval ls tasks` lists those of the library"
            raise ConfigError(f"unknown task {name!r}; {hint}")
        try:
            found = manager.load(name)
        except (Exception, SystemExit) as e:  # the library raises any exception for a task's file or data
            hint = ""
            if isinstance(e, ConnectionError) or "find cache for" in str(e):
                hint = "; --online downloads data that is not in the local cache"
            raise ConfigError(f"task {name!r}: {first_line(e)}{hint}") from e
        for task in found["tasks"].values():
            if getattr(task, "MULTIMODAL", False):
                raise ConfigError(f"the task {task.task_name!r} reads images or sound, which is not supported")
            if getattr(task, "UNSAFE_CODE", False):  # the library would execute it
                raise ConfigError(
                    f"the task {task.task_name!r} runs code that the model writes, which is not supported"
                )
        group = found.get("groups", {}).get(name)
        loaded += [group] if group is not None else found["tasks"].values()
    return loaded


def table_rows(results: Results) -> list[dict[str, object]]:
    """Return one table row, with the value and its standard error, for each task or group, metric and filter."""
    rows: list[dict[str, object]] = []
    for task, measures in results["results"].items():
        for key, value in measures.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = measures.get(f"{metric}_stderr,{name}")
            n = results["n-samples"].get(task, {}).get("effective") or measures.get("sample_len")
            rows.append({
                "task": task, "metric": metric, "filter": name, "value": _number(value),
                "stderr": _number(stderr), "n": n, "num_fewshot": results["n-shot"].get(task),
            })  # fmt: skip
    return rows


def _number(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None
