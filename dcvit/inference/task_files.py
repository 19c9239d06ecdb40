"""Checks of lm-evaluation-harness task files that could run code, and a sandbox for their templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from dcvit.errors import ConfigError, first_line
from input_pipeline.files import read_regular

Event: TypeAlias = Any  # yaml.Event; PyYAML comes with the extra `eval`
Environment: TypeAlias = Any  # jinja2.Environment; Jinja comes with the extra `eval`, too

PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value", "binary")
READERS = ("pandas", "sql", "spark", "generator")  # data readers that unpickle, open any database or file, or run code
MAX_DEPTH, MAX_VALUES = 100, 1_000_000  # of a task file
MAX_CHARACTERS = 1 << 24  # of the text that a template renders
MAX_SHOWN = 60  # characters of a template that an error message shows
CODE_KEYS = ("hf_evaluate", "use_prompt", "unsafe_code")  # keys of a task that load code or permit it


def check_task_files(folder: Path) -> None:
    """Check that the task files of a folder, and the files they include, cannot run code.

    The library `lm_eval` must not have read the files before, because reading a file can run its code.

    Raises:
      ConfigError: a file can run code or cannot be read; the message names the file and the reason.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the parser that the library uses
    queue, checked = [(path, "") for path in sorted(folder.glob("**/*.yaml"))], set[Path]()
    while queue:
        path, origin = queue.pop(0)
        path = path.resolve()
        if path in checked:
            continue
        checked.add(path)
        try:
            content = read_regular(path)
            tags = sorted(_special_tags(yaml.parse(content, Loader=loader)))
            task = None if tags else yaml.load(content, Loader=loader)  # without special tags this builds plain values
        except (OSError, ValueError, yaml.YAMLError) as e:
            raise ConfigError(f"cannot read the task file {path}{origin}: {' '.join(str(e).split())}") from None
        reason = f"the tag {tags[0]!r}" if tags else _reason(task)
        if reason:
            raise ConfigError(f"{path}: {reason} can run code or fetch it; give --allow_code if you trust it")
        included = task.get("include", []) if isinstance(task, dict) else []
        for name in included if isinstance(included, list) else [included]:
            queue.append((path.parent / str(name), f", included by {path}"))


@contextlib.contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Make lm-evaluation-harness render the templates of tasks in Jinja's sandbox inside a `with` statement.

    The sandbox keeps a template from Python's internals, through which it could run code. It does not limit time.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    original = utils.env
    environment = ImmutableSandboxedEnvironment(
        undefined=original.undefined, keep_trailing_newline=original.keep_trailing_newline
    )
    environment.filters |= original.filters
    utils.env = _Sandbox(environment)
    try:
        yield
    finally:
        utils.env = original


class _Sandbox(NamedTuple):
    """Replacement of the library's Jinja environment and, with a `template`, of a Jinja template."""

    environment: Environment
    template: str = ""

    def from_string(self, template: str) -> _Sandbox:
        """Return an object that renders the text `template`."""
        return self._replace(template=template)

    def render(self, **values: object) -> str:
        """Return the template filled with values of its variables. Raise ConfigError if it fails or is too long."""
        try:
            text: str = self.environment.from_string(self.template).render(values)
        except Exception as e:
            reason = first_line(e)
        else:
            if len(text) <= MAX_CHARACTERS:
                return text
            reason = f"the text has {len(text):,} characters, more than the limit of {MAX_CHARACTERS:,}"
        raise ConfigError(f"the task template {self.template[:MAX_SHOWN]!r}: {reason}")


def _special_tags(events: Iterator[Event]) -> set[str]:
    """Return the YAML tags in a document, such as `!function`, that do not stand for plain values.

    PyYAML crashes at deep nesting, and a copy of a document has its aliases expanded; too much of either is an error.

    Raises:
      ConfigError: the document is nested deeply, contains itself, or is huge with its aliases expanded.
    """
    import yaml

    plain = {"!", *(f"tag:yaml.org,2002:{name}" for name in PLAIN_TAGS)}
    tags: set[str] = set()
    sizes: dict[str | None, int] = {}  # values in each anchored part
    stack: list[tuple[str | None, int]] = [(None, 0)]  # the anchors of the open parts, and the values in them so far
    for event in events:
        tags |= {getattr(event, "tag", None) or "!"} - plain
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, 0))
            if len(stack) > MAX_DEPTH:
                raise ConfigError(f"nested more than {MAX_DEPTH} deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = stack.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 0
        elif isinstance(event, yaml.AliasEvent) and event.anchor in sizes:
            anchor, size = None, sizes[event.anchor]
        elif isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"the alias *{event.anchor} has no complete anchor before it")
        else:
            continue
        sizes[anchor] = size + 1
        stack[-1] = (stack[-1][0], stack[-1][1] + size + 1)
        if stack[-1][1] > MAX_VALUES:
            raise ConfigError(f"more than {MAX_VALUES:,} values, with aliases expanded")
    return tags


def _reason(task: object) -> str | None:
    """Return a phrase that names what in a task would make the library load or run code; None if nothing would."""
    queue, visited = [task], set()
    while queue:
        value = queue.pop()
        if id(value) in visited or not isinstance(value, dict | list):
            continue
        visited.add(id(value))
        if isinstance(value, list):
            queue += value
            continue
        if reason := _reason_in_mapping(value):
            return reason
        queue += value.values()
    return None


def _reason_in_mapping(task: dict[object, object]) -> str | None:
    """Return the phrase of `_reason` for one mapping of a task, without its nested values."""
    from lm_eval.api import metrics, registry  # noqa: F401 -- importing metrics fills the registry

    for key in CODE_KEYS:
        if key in task:
            return f"the key {key!r}"
    if task.get("dataset_path") in READERS:
        return f"data read by {task['dataset_path']!r}"
    if "://" in json.dumps(task.get("data_files", "")):
        return "data from an address"
    listed = task.get("metric_list")
    for metric in listed if isinstance(listed, list) else []:
        name = metric.get("metric") if isinstance(metric, dict) else metric
        if str(name) not in registry.METRIC_REGISTRY:  # the library would search for a script of this name
            return f"the unknown metric {name!r}"
    return None
