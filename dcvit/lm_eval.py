"""Language model benchmarks: `python -m dcvit.lm_eval --workdir DIR --tasks lambada_openai,piqa [--num_fewshot 0] …`.

Runs tasks of lm-evaluation-harness (the `eval` extra) on a trained language model and prints a row for each task and
metric. Data comes from the local cache, unless `--online` is given. `--include_path DIR` adds the task files of a
folder, which may run code.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcvit import cli
from dcvit.errors import CheckpointError, ConfigError, first_line_with_type
from input_pipeline.optional import require, require_extra

if TYPE_CHECKING:  # it imports the library, whose variables `prepare` sets before
    from dcvit.inference.harness import HarnessModel

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
# Resamples of the bootstrap, for metrics whose standard error has no formula. The harness's 100,000 take minutes.
RESAMPLES = 1000


def prepare(online: bool) -> None:
    """Set the variables that the harness and its libraries read when they are imported: `online` allows downloads.

    Raises:
      MissingLibraryError: the harness is not installed.
    """
    require_extra("eval")
    os.environ["DISABLE_MULTIPROC"] = "1"  # a process with JAX's threads should not fork
    if not online:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))


def evaluate_tasks(
    model: HarnessModel, names: Sequence[str], include_path: Path | None = None, **options: object
) -> dict[str, Any]:
    """Run tasks, groups or tags on a model and return the library's results.

    Task files in the folder `include_path` may run code. `options` are further arguments of `simple_evaluate`.

    Raises:
      ConfigError: a task is unknown or not supported, or its data is missing.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from yaml import YAMLError

    template_error = require("jinja2").TemplateError
    try:
        manager = TaskManager(include_path=include_path and str(include_path))
        with contextlib.redirect_stdout(sys.stderr):  # the library prints to stdout
            results: dict[str, Any] = simple_evaluate(
                model, tasks=list(names), task_manager=manager, log_samples=False, bootstrap_iters=RESAMPLES, **options
            )
        return results
    except (ConfigError, CheckpointError):
        raise
    except (ImportError, KeyError, OSError, ValueError, template_error, YAMLError) as e:
        raise ConfigError(f"lm_eval: {first_line_with_type(e)}") from e


def table_rows(results: dict[str, Any]) -> list[dict[str, object]]:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit lm_eval",
        description="Run tasks of lm-evaluation-harness on a language model.",
        examples=["dcvit lm_eval --workdir runs/text --tasks lambada_openai,piqa"],
    )
    cli.add_model_options(parser)
    parser.add_argument("--tasks", required=True, help="comma-separated names of tasks, groups or tags")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question; by default the tasks decide")
    parser.add_argument("--limit", type=int, help="maximum number of questions of each task, for a quick test")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a batch, over all devices")
    parser.add_argument("--include_path", type=cli.path, help="folder of further task files (YAML), which may run code")
    parser.add_argument("--online", action="store_true", help="download data that is not in the local cache")
    parser.add_argument("--tokenizer", help="tokenizer.json, instead of the config's tokenizer")
    args, overrides = parser.parse(argv)
    for name, minimum in (("num_fewshot", 0), ("limit", 1), ("batch_size", 1)):
        if (value := getattr(args, name)) is not None and value < minimum:
            raise ConfigError(f"--{name} {value}: should be {minimum} or more")
    if args.include_path and not args.include_path.is_dir():
        raise ConfigError(f"--include_path: no folder {args.include_path}")
    config = cli.check_model(args, overrides)

    from dcvit.inference.loading import open_model
    from dcvit.inference.texts import LanguageModel

    cli.start_jax(forward_only=True)
    prepare(args.online)
    from dcvit.inference.harness import HarnessModel  # imports lm_eval, which reads the variables of `prepare`

    opened = open_model(LanguageModel, args.workdir, config, args.checkpoint, overrides)
    tokenizer = opened.open_tokenizer(args.tokenizer)
    model = HarnessModel(
        opened.module, opened.params, tokenizer, end_tokens=opened.end_tokens, batch_size=args.batch_size
    )
    results = evaluate_tasks(
        model, args.tasks.split(","), args.include_path, num_fewshot=args.num_fewshot, limit=args.limit
    )
    cli.show(table_rows(results), args.format)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
