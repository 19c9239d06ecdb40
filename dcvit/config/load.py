"""Configs: find, load, override and check them before anything compiles.

A config file is Python with one function, `get_config(**arguments)`, that returns an ml_collections ConfigDict.
Loading the file runs its code. A config may hold the keys of `KEYS`, and the durations of `DURATIONS`, each as
`X_steps`, `X_epochs`, `X_examples` or `X_percent`.

A config file of big_vision may be given, too. Its keys are translated; see `dcvit.config.big_vision`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import logging
import re
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from etils import epath
from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from dcvit.config import big_vision
from dcvit.config.durations import is_duration
from dcvit.config.keys import ARGUMENTS, DURATIONS, KEYS, RANGES, SYNONYMS, UNITS, unknown_key
from dcvit.config.values import Json, check_types, defaults, known_keys, read_json
from dcvit.errors import ConfigError, InputError, first_line, nearest
from input_pipeline import huggingface
from input_pipeline.files import expand

Place: TypeAlias = Path | epath.Path  # a local folder, or one of an object store
Commits: TypeAlias = Callable[[], Mapping[str, str]]  # returns what `huggingface.by_repository` does
LOG = logging.getLogger(__name__)
HUB_KEYS = ("model_init", "teacher", "tokenizer")  # whose value may name a repository of the Hugging Face Hub
# The folder with `configs`: the package in a wheel, or else the clone around it. In a wheel, the folder around the
# package is site-packages, where `configs` and `docs` may be those of another package.
PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent


def load(spec: str, overrides: Sequence[str] = (), workdirs: Sequence[Place] = ()) -> ConfigDict:
    """Load "NAME[:key=value,…]" with "a.b=value" overrides, and return the checked and locked config.

    NAME is the path of a Python file, or the bare name of a config of the package. Overrides set keys of dcvit, also in
    a file of big_vision; each change of its keys is logged. "evals.*.KEY=VALUE" sets a key of all evaluators. A name
    `hf:OWNER/NAME` in an argument or in a key of `HUB_KEYS` gets the commit that it has now, or had when a run in one
    of `workdirs` was started.

    Raises:
      ConfigError: the file is missing or fails, a key is unknown (the message suggests the nearest one), or a value has
        the wrong type.
    """
    name, _, arguments = spec.partition(":")
    path = _find(name)
    commits = functools.cache(lambda: _commits(workdirs))  # a run without such names is not read
    given = _translated(path, _run(path, arguments, commits))
    for key in given:
        if key not in KEYS and not is_duration(key, DURATIONS):
            raise ConfigError(f"{path}: {unknown_key(f'config.{key}', key, known_keys())}")
    config = ConfigDict(defaults() | given)
    for override in itertools.chain.from_iterable(_each_evaluator(config, override) for override in overrides):
        try:
            _override(config, override)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as e:  # not a value of a ConfigDict
            raise ConfigError(f"--config.{override}: {first_line(e)}") from None
    check_types(config)
    for key in config.model:
        if (meant := SYNONYMS.get(key, "")).startswith("model.") and meant != f"model.{key}":
            raise ConfigError(unknown_key(f"config.model.{key}", key, ()))
    for holder, key in list(_repositories(config)):
        holder[key] = _pinned(holder[key], f"the config's {key}", commits)
    return config.lock()


def _commits(workdirs: Sequence[Place]) -> dict[str, str]:
    """Return the names of repositories with their commits in the configs of runs, by the names without them."""
    found: list[str] = []
    for file in (workdir / "config.json" for workdir in workdirs):
        if file.is_file():
            found += [holder[key] for holder, key in _repositories(read_json(file).to_dict())]
    return huggingface.by_repository(found)


def _repositories(config: Json | ConfigDict) -> Iterator[tuple[Json | ConfigDict, str]]:
    """Yield (dict, key) for each value of a config that is the name of a repository of the Hugging Face Hub."""
    for key, value in config.items():
        if isinstance(value, dict | ConfigDict):
            yield from _repositories(value)
        elif key in HUB_KEYS and huggingface.is_name(value):
            yield config, key


def _pinned(name: str, what: str, commits: Commits) -> str:
    """Return the name of a repository with a commit. Raises ConfigError, about `what`, if the Hub does not tell it."""
    try:
        return huggingface.pinned(name, commits())
    except InputError as e:
        raise ConfigError(f"{what}: {e}") from None


def _find(name: str) -> Path:
    """Return the file of a config given by path or by bare name."""
    if "/" in name or name.endswith(".py"):
        path = expand(name if name.endswith(".py") else f"{name}.py")
        if not path.is_file():
            hint = f"; the package has {path.stem!r}" if any(path.stem == p.stem for p in shipped()) else ""
            raise ConfigError(f"no config file {name}{hint}")
        return path
    known = {path.stem: path for path in shipped()}
    if name not in known:
        raise ConfigError(f"no config named {name!r}; {nearest(name, known)}")
    return known[name]


def _translated(path: Path, config: Json) -> Json:
    """Return `config` with keys of dcvit: keys of big_vision are translated, and each translation is logged."""
    if not big_vision.is_big_vision(config):
        return config
    try:
        config, changes = big_vision.translate(config)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    for change in changes:
        LOG.info("%s: %s", path.name, change)
    return config


def _run(path: Path, text: str, commits: Commits) -> Json:
    """Execute a config file and return the config that its get_config gives for the arguments in `text`, as a dict."""
    with _executing(path):
        get_config = _functions(path)["get_config"]
        config = get_config(**_arguments(path, inspect.signature(get_config).parameters, text, commits))
        if not isinstance(config, ConfigDict):
            raise ConfigError(f"{path}: get_config returned a {type(config).__name__}, expected a ConfigDict")
        found: Json = config.to_dict()
    return found


@contextlib.contextmanager
def _executing(path: Path) -> Iterator[None]:
    """Provide the modules that config files of big_vision import, and raise errors as ConfigErrors about the file."""
    try:
        with big_vision.importable():
            yield
    except ConfigError:
        raise
    except RequiredValueError:
        raise ConfigError(f"{path}: a required placeholder has no value; make it an argument of get_config") from None
    except (Exception, SystemExit) as e:
        raise ConfigError(f"{path}: {type(e).__name__}: {first_line(e)}") from e


def _functions(path: Path) -> Json:
    """Execute a config file, and return its functions, which include get_config, and its docstring by name."""
    found: Json = runpy.run_path(str(path))
    if "get_config" not in found:
        raise ConfigError(f"{path} has no function get_config")
    return found


def describe(name: str) -> str:
    """Return the help of a config: its header with commands, its arguments, and the keys of its first command.

    Raises:
      ConfigError: the file is missing or fails.
    """
    path = _find(name)
    with _executing(path):
        found = _functions(path)
    get_config, header = found["get_config"], inspect.cleandoc(found.get("__doc__") or "")
    parameters = inspect.signature(get_config).parameters.values()
    example = re.search(rf"{re.escape(path.stem)}(?:\.py)?(?::(\S+))?", header)
    arguments = (example and example[1]) or ""
    if path in shipped():
        header = re.sub(r"configs/(\w+)\.py", r"\1", header)
    lines = [header, "", f"Arguments, --config {name}:NAME=VALUE,…", *map(_parameter, parameters)]
    lines += ["", inspect.cleandoc(get_config.__doc__ or "")]
    try:
        config = _translated(path, _run(path, arguments, dict))
    except ConfigError as e:
        return "\n".join(
            [*lines, "", f"The keys depend on the arguments ({e}); `dcvit help config` explains all keys."]
        )
    given = f" with {arguments}" if arguments else ""
    lines += ["", f"Keys{given}; --config.KEY=VALUE overrides one, and `dcvit help config` explains all:"]
    lines += [f"  {key} = {value!r}" for key, value in _flat(config) if not key.startswith("evals.")]
    return "\n".join(lines)


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a line about an argument of a config: its name, type and default, as far as they are given."""
    empty = inspect.Parameter.empty
    kind = "" if parameter.annotation is empty else inspect.formatannotation(parameter.annotation)
    default = "" if parameter.default is empty else repr(parameter.default)
    return f"  {parameter.name:13} {kind:11} {default}".rstrip()


def _flat(values: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of each entry of nested dicts that is not a dict."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _arguments(path: Path, parameters: Mapping[str, inspect.Parameter], text: str, commits: Commits) -> Json:
    """Return the arguments of a get_config from `text`, converted to the types of its defaults.

    A get_config of big_vision has one parameter, `arg`, and parses the text itself.
    """
    if list(parameters) == ["arg"]:
        return {"arg": text} if text else {}
    arguments = _parse_arguments(text)
    for key, value in arguments.items():
        if huggingface.is_name(value):
            arguments[key] = _pinned(value, f"argument {key}", commits)
        if key not in parameters:
            raise ConfigError(f"{path} takes no argument {key!r}; {_argument_hint(key, parameters)}")
    return {k: _like(parameters[k].default, v, f"argument {k}") for k, v in arguments.items()}


def _argument_hint(key: str, parameters: Iterable[str]) -> str:
    """Return the end of a message about an unknown argument: the one, or the key of a config, that it may stand for."""
    if same := [name for name in ARGUMENTS.get(key, ()) if name in parameters]:
        return f"did you mean {' or '.join(map(repr, same))}?"
    if (meant := SYNONYMS.get(key, key)) in known_keys() or "." in meant:
        return f"set it as --config.{meant}=VALUE"
    hint = nearest(key, parameters)
    if hint.startswith("did you mean"):
        return hint
    return f"{hint}; give other values as --config.KEY=VALUE, fields of the model as --config.model.{key}=VALUE"


def shipped() -> list[Path]:
    """Return the config files of the package."""
    return sorted((ROOT / "configs").glob("*.py"))


def _parse_arguments(text: str) -> dict[str, str]:
    """Parse "a=1,b=x" to a dict of strings; a value in quotes may contain commas."""
    items = re.findall(r"""[^,=]+=(?:'[^']*'|"[^"]*")(?=,|$)|[^,]+""", text)
    pairs = [item.partition("=") for item in items]
    for key, equals, _ in pairs:
        if not equals or not key:
            expected = "is not of the form key=value; quote a value with commas: key='a,b'"
            raise ConfigError(f"config argument {key!r} {expected}")
    return {key: value for key, _, value in pairs}


def _literal(text: str) -> Any:
    """Return the value of a command-line word: a Python literal, true/false/none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _like(old: Any, text: str, what: str) -> Any:
    """Convert `text` to the type of `old`. None is accepted for every type here; `check_types` checks it later."""
    value = _literal(text)
    if value is None:
        return None
    if isinstance(old, str):
        return value if isinstance(value, str) else text
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if old is None or old is inspect.Parameter.empty or type(value) is type(old):
        return value
    if isinstance(old, ConfigDict) and isinstance(value, dict):
        return ConfigDict(value)
    if isinstance(old, list | tuple) and isinstance(value, list | tuple):
        return value
    expected = f"of type {type(old).__name__}, not {type(value).__name__}"
    if isinstance(old, tuple) and (key := what.removeprefix("config.")) in RANGES:
        expected = RANGES[key][1]  # such as the parts of `early_stop`
    raise ConfigError(f"{what}={text} should be {expected}")


def _each_evaluator(config: ConfigDict, override: str) -> list[str]:
    """Return the overrides that "evals.*.KEY=VALUE" stands for, one for each evaluator, or else the override."""
    if not override.startswith("evals.*."):
        return [override]
    if not config.evals:
        raise ConfigError(f"--config.{override}: config.evals has no evaluators")
    return [f"evals.{name}.{override.removeprefix('evals.*.')}" for name in config.evals]


def _override(config: ConfigDict, override: str) -> None:
    """Set "a.b=value" in `config`. A duration replaces the same duration in another unit; None removes its own unit."""
    path, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--config.{override}: expected --config.KEY=VALUE")
    *parents, last = path.split(".")
    target = config
    for i, part in enumerate(parents):
        if part not in target or not isinstance(target[part], ConfigDict):
            known = [k for k in target if isinstance(target[k], ConfigDict)]
            raise ConfigError(unknown_key(f"config.{'.'.join(parents[: i + 1])}", part, known))
        target = target[part]
    if target is config and last not in config and not is_duration(last, DURATIONS):
        raise ConfigError(unknown_key(f"config.{last}", last, known_keys()))
    prefix, _, unit = last.rpartition("_")
    timed = bool(prefix) and unit in UNITS  # a number, as `Durations` checks
    value = _like(None if timed else target.get(last), text, f"config.{path}")
    others = [f"{prefix}_{u}" for u in UNITS if f"{prefix}_{u}" in target] if timed else []
    if value is None and others:
        if last in target:
            del target[last]
        return
    for other in others:
        del target[other]
    with target.ignore_type():
        target[last] = value
