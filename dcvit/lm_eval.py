"""The harness's tasks: `python -m dcvit.lm_eval --workdir DIR --tasks lambada_openai,piqa [--num_fewshot 0] …`.

Scores a trained language model on tasks of lm-evaluation-harness (the `eval` extra) and shows a row for each task and
metric. Data comes from the local cache only, unless `--online` is given. `--include_path DIR` adds the task files of
a folder; what in them can run code is refused, unless `--allow_code` is given.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcvit import cli
from dcvit.errors import ConfigError, first_line
from dcvit.evaluate import add_options
from dcvit.training.trained import TrainedModel, open_trained

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value", "binary")
READERS = ("pandas", "sql", "spark", "generator")  # of data: unpickle, open any data base or file, run code
CODE_KEYS = ("hf_evaluate", "use_prompt", "unsafe_code")  # keys of a task that load code or let some run
RESAMPLES = (
    1000  # of the bootstrap, for metrics whose standard error has no formula; the harness's 100,000 take minutes
)


def check_task_files(folder: Path) -> None:
    """Refuses task files, and what they include, that can run code. The library must not have read them before.

    Raises:
      ConfigError: such a file, or one that cannot be read; the message names it and the reason.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the parser that the library uses too
    todo, seen = [(path, "") for path in sorted(folder.glob("**/*.yaml"))], set()
    while todo:
        path, why = todo.pop(0)
        path = path.resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            content = path.read_bytes()
            tags = sorted(_tags(yaml.compose(content, Loader=loader)))
            task = None if tags else yaml.load(content, Loader=loader)  # by now it builds plain values only
        except (OSError, ValueError, yaml.YAMLError) as e:
            raise ConfigError(f"cannot read the task file {path}{why}: {' '.join(str(e).split())}") from None
        reason = f"the tag {tags[0]!r}" if tags else _code(task)
        if reason:
            raise ConfigError(f"{path}: {reason} can run code or fetch it; give --allow_code if you trust it")
        included = task.get("include", []) if isinstance(task, dict) else []
        for name in included if isinstance(included, list) else [included]:
            todo.append((path.parent / str(name), f", included by {path}"))


def _tags(root: Any) -> set[str]:
    """The tags of a YAML document that are not those of plain values."""
    known = {f"tag:yaml.org,2002:{name}" for name in PLAIN_TAGS}
    found, seen, todo = set(), set(), [root] if root is not None else []
    while todo:
        node = todo.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if node.tag not in known:
            found.add(node.tag)
        if isinstance(node.value, list):
            todo += [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
    return found


def _code(value: Any) -> str | None:
    """What in a task's plain values makes the library load or run code, or None."""
    from lm_eval.api import metrics, registry  # noqa: F401 -- importing metrics fills the registry

    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        if id(value) in seen or not isinstance(value, dict | list):
            continue
        seen.add(id(value))
        if isinstance(value, list):
            todo += value
            continue
        for key in CODE_KEYS:
            if key in value:
                return f"the key {key!r}"
        if value.get("dataset_path") in READERS:
            return f"data read by {value['dataset_path']!r}"
        if "://" in json.dumps(value.get("data_files", "")):
            return "data from an address"
        listed = value.get("metric_list")
        for metric in listed if isinstance(listed, list) else []:
            name = metric.get("metric") if isinstance(metric, dict) else metric
            if str(name) not in registry.METRIC_REGISTRY:  # would be looked for as a script
                return f"the unknown metric {name!r}"
        todo += value.values()
    return None


@contextlib.contextmanager
def sandboxed_templates() -> Iterator[None]:
    """While it lasts, templates of tasks cannot reach Python's internals, by which they too can run code."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    free = utils.env
    utils.env = SandboxedEnvironment(undefined=free.undefined, keep_trailing_newline=free.keep_trailing_newline)
    utils.env.filters.update(free.filters)
    try:
        yield
    finally:
        utils.env = free


def load_tasks(manager: Any, names: Iterable[str]) -> list[Any]:
    """The tasks and groups of these names, with their data, by the library's task manager.

    Raises:
      ConfigError: an unknown name, a task that cannot be loaded or run, or one that is named twice.
    """
    found: list[Any] = []
    tasks: set[str] = set()
    known = set(manager.all_tasks)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`lm_eval ls tasks` lists those of the library"
            raise ConfigError(f"unknown task {name!r}; {hint}")
        try:
            loaded = manager.load(name)
        except (Exception, SystemExit) as e:  # whatever a task's file and data make the library raise
            hint = ""
            if isinstance(e, ConnectionError) or "find cache for" in str(e):
                hint = "; --online downloads what is not in the local cache"
            raise ConfigError(f"task {name!r}: {first_line(e)}{hint}") from e
        for task in loaded["tasks"].values():
            if task.task_name in tasks:
                raise ConfigError(f"the task {task.task_name!r} of {name!r} is named twice")
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                what = "reads images or sound" if getattr(task, "MULTIMODAL", False) else "runs what the model writes"
                raise ConfigError(f"the task {task.task_name!r} {what}, which is not supported")
            tasks.add(task.task_name)
        group = loaded.get("groups", {}).get(name)
        found += [group] if group is not None else loaded["tasks"].values()
    return found


def run(model: Any, tasks: Sequence[Any], *, num_fewshot: int | None = None, limit: int | None = None) -> Any:
    """The library's results of a `HarnessModel` on loaded tasks, as values that JSON can hold."""
    from lm_eval import simple_evaluate

    with contextlib.redirect_stdout(sys.stderr):  # for what the library prints between
        results = simple_evaluate(
            model, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, log_samples=False,
            bootstrap_iters=RESAMPLES, batch_size=model.batch_size,
        )  # fmt: skip
    return plain(results)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: other keys and objects as text, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's numbers
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return getattr(value, "__qualname__", None) or str(value)


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each task or group, metric and filter of the library's results."""
    rows = []
    for task, numbers in results["results"].items():
        for key, value in numbers.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = numbers.get(f"{metric}_stderr,{name}")
            n = results["n-samples"].get(task, {}).get("effective") or numbers.get("sample_len")
            rows.append({
                "task": task, "metric": metric, "filter": name, "value": value,
                "stderr": stderr if isinstance(stderr, float) else None,
                "n": n, "num_fewshot": results["n-shot"].get(task),
            })  # fmt: skip
    return rows


def prepare(online: bool) -> None:
    """Settings of the libraries, before they are imported. Raises ConfigError where they are not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError('this needs lm_eval, which is not installed: pip install "dcvit[eval]"')
    os.environ["DISABLE_MULTIPROC"] = "1"  # a process with JAX's threads should not fork
    if not online:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit lm_eval", description="Run tasks of lm-evaluation-harness on a language model.")
    add_options(parser)
    parser.add_argument("--tasks", required=True, help="names of tasks, groups or tags, with commas between")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question; by default as tasks say")
    parser.add_argument("--limit", type=int, help="only so many questions of each task, to try things out")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--include_path", type=cli.path, help="folder of further task files (YAML)")
    parser.add_argument("--allow_code", action="store_true", help="let those files name Python code to run")
    parser.add_argument("--online", action="store_true", help="download data that is not in the local cache")
    parser.add_argument("--tokenizer", help="the tokenizer, instead of the config's own")
    parser.add_argument("--out", type=cli.path, help="JSON file for all that the library reports")
    args, overrides = parser.parse(argv)
    for name, least in (("num_fewshot", 0), ("limit", 1), ("batch_size", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: should be {least} or more")
    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    if not names:
        raise ConfigError("--tasks names no task")
    if args.include_path and not args.include_path.is_dir():
        raise ConfigError(f"--include_path: no folder {args.include_path}")
    trained = open_trained(args.workdir, args.config, args.checkpoint, overrides)
    if args.out:
        args.out.open("a").close()  # what is wrong with the file is said now, not after the work
    prepare(args.online)
    results = evaluate_tasks(args, names, trained)
    results["config"]["model"] = str(trained.checkpoint)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    cli.show(rows_of(results), args.format)
    return 0


def evaluate_tasks(args: Any, names: Sequence[str], trained: TrainedModel) -> Any:
    """The results of the command's tasks on its model."""
    guarded = args.include_path is not None and not args.allow_code
    if guarded:
        check_task_files(args.include_path)
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    from dcvit.inference.harness import HarnessModel

    try:
        with sandboxed_templates() if guarded else contextlib.nullcontext():
            tasks = load_tasks(TaskManager(include_path=args.include_path and str(args.include_path)), names)
            net, params = trained.language_model()
            tokenizer = trained.tokenizer(args.tokenizer)
            model = HarnessModel(net, params, tokenizer, batch_size=args.batch_size)
            return run(model, tasks, num_fewshot=args.num_fewshot, limit=args.limit)
    except TemplateError as e:
        raise ConfigError(f"a task's template: {first_line(e)}") from None


if __name__ == "__main__":
    sys.exit(cli.run(main))
