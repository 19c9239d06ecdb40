"""Config files of big_vision: the modules that they import, and the translation of their keys to those of dcvit.

Keys of big_vision are kept, renamed or converted so that the result is the same. `RULES` says which are renamed, and
which are dropped, because they concern the speed of big_vision's own input pipeline or the look of its output. Keys
without translation stay, and are an error where dcvit does not know them, either.

`parse_arg` and `get_fewshot_lsr` have the arguments and results of those in `big_vision.configs.common`, which config
files import as `bvcc`, and in `common_fewshot` beside it.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from dcvit.config.keys import UNITS
from dcvit.errors import ConfigError, first_line_with_type, nearest

Values: TypeAlias = dict[str, Any]  # a dict of a config


class Action(enum.Enum):
    """Treatment of a key that keeps its name, or goes."""

    DROP = "has no effect on the result"
    PERCENT = "a duration, a fraction from 0 to 1 in big_vision"


# By dict of a config and key: an action, the new name, or a list of the values for which dcvit needs no key.
Rules: TypeAlias = Mapping[str, Action | str | Sequence[object]]
FSDP = [(".*", 'fsdp(axis="data")')]
RULES: dict[str, Rules] = {
    "config": {
        **dict.fromkeys(("pp_modules", "prefetch_to_device", "ckpt_timeout", "fewshot"), Action.DROP),
        **{f"log_training_{unit}": f"log_{unit}" for unit in UNITS},
        **dict.fromkeys(("total_percent", "log_percent", "ckpt_percent", "keep_ckpt_percent"), Action.PERCENT),
        "mesh": [[("data", -1)]],
        "sharding_rules": [[("act_batch", "data")], [("act_batch", ("data",))]],
        "sharding_strategy": [[(".*", "replicate")], FSDP],
    },
    "input": dict.fromkeys(("shuffle_buffer_size", "num_parallel_calls", "prefetch"), Action.DROP),
    "evaluator": {
        **dict.fromkeys(("prefix", "skip_first", "display_first"), Action.DROP),
        **dict.fromkeys(("prefetch", "cache", "cache_final", "cache_raw"), Action.DROP),
        "log_percent": Action.PERCENT, "loss_name": "loss", "pp_fn": "pp",
    },
    "few-shot evaluator": {"representation_layer": "representation"},
    "schedule": {"warmup_percent": Action.PERCENT, "cooldown_percent": Action.PERCENT},
    "linear schedule": {"linear_end": "end", "power": [1]},
    "momentum": {"momentum": "decay", "dtype": "accumulator_dtype"},
}  # fmt: skip
OPTIMIZERS = {"big_vision.momentum_hp": "trace", "big_vision.scale_by_adafactor": "scale_by_adafactor"}
# Keys of which dcvit has none, so that a config with one of them is one of big_vision.
MARKS = {key for key in RULES["config"] if key.startswith("log_training") or RULES["config"][key] is Action.DROP}
MARKS |= {"init_head_bias"}
ON_LABELS = ("onehot", "keep", "drop")  # ops that an image file without label does not need
# name: data set of tensorflow-datasets, split of the examples to fit, split of the test
DATASETS = {
    "caltech": ("caltech101", "train", "test"),
    "cars": ("cars196:2.1.0", "train", "test"),
    "cifar100": ("cifar100", "train", "test"),
    "dtd": ("dtd", "train", "test"),
    "pets": ("oxford_iiit_pet", "train", "test"),
    "uc_merced": ("uc_merced", "train[:1000]", "train[1000:]"),
}


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Make the modules importable that config files of big_vision import, inside the context."""
    if "big_vision" in sys.modules:
        yield
        return
    names = ("big_vision", "big_vision.configs", "big_vision.configs.common", "big_vision.configs.common_fewshot")
    modules = {name: types.ModuleType(name) for name in names}
    for module in modules.values():
        module.__path__ = []
        vars(module).update(parse_arg=parse_arg, get_fewshot_lsr=get_fewshot_lsr)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def parse_arg(arg: str | None, **spec: object) -> ConfigDict:
    """Parse the text behind the colon of `--config FILE:TEXT`, such as "runlocal,res=128".

    A word without value sets an argument to true. A single word that is no argument is the value of the first one.

    Args:
      arg: the text; None or "" gives the defaults.
      **spec: the default of each argument, whose type is that of the argument, or a pair (default, type).

    Raises:
      ValueError: an argument is unknown, or a value has another type.
    """
    defaults = {key: value if isinstance(value, tuple | list) else (value, type(value)) for key, value in spec.items()}
    words = [word for word in (arg or "").split(",") if word]
    if len(words) == 1 and "=" not in words[0] and spec and words[0] not in spec:
        words = [f"{next(iter(spec))}={words[0]}"]
    result = ConfigDict({key: default for key, (default, _) in defaults.items()}, type_safe=False)
    for word in words:
        key, equals, text = word.partition("=")
        if key not in spec:
            raise ValueError(f"no argument {key!r}; {nearest(key, spec)}")
        kind = defaults[key][1]
        if kind is bool:
            result[key] = {"true": True, "false": False}[text.lower() if equals else "true"]
        else:
            result[key] = text if kind is type(None) else kind(text)
    return result


def get_fewshot_lsr(
    target_resolution: int = 224, resize_resolution: int = 256, runlocal: bool = False, **kw: object
) -> ConfigDict:
    """Return the config of a few-shot evaluation.

    Args:
      target_resolution: side of the crop from the middle of an image.
      resize_resolution: side of the image before the crop.
      runlocal: evaluate only one small data set.
      **kw: further keys, in place of the defaults.
    """
    pp = (
        f'decode|resize({resize_resolution})|central_crop({target_resolution})|value_range(-1,1)|keep("image", "label")'
    )
    log = {} if any(f"log_{unit}" in kw for unit in UNITS) else {"log_steps": 25_000}
    return ConfigDict(
        {
            "type": "fewshot_lsr", "representation_layer": "pre_logits", "shots": (1, 5, 10, 25), "l2_reg": 2.0**10,
            "num_seeds": 3, "pp_train": pp, "pp_eval": pp,
            "datasets": {"pets": DATASETS["pets"]} if runlocal else dict(DATASETS),
            **log, **kw,
        }
    )  # fmt: skip


class Part:
    """A dict of a config: the config itself, or one of its values.

    Attributes:
      values: the keys that are not None, which the methods change.
      name: name of the dict in messages, such as "config.input".
      notes: a line for each change, for the changes of all parts of a config.
    """

    def __init__(self, values: object, name: str, notes: list[str]):
        """Copy the dict. Raises ConfigError if `values` is neither a dict nor None."""
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"{name}={values!r} should be a dict")
        self.values: Values = {key: value for key, value in (values or {}).items() if value is not None}
        self.name, self.notes = name, notes

    def note(self, text: str) -> None:
        """Add the description of a change to the notes."""
        self.notes.append(f"{self.name}: {text}")

    def inner(self, key: str) -> Part:
        """Remove the dict at `key` and return it as a part, which is empty if there is no such dict."""
        return Part(self.values.pop(key, None), f"{self.name}.{key}", self.notes)

    def put(self, key: str, value: object, old: str) -> None:
        """Set a key, and note what it replaces."""
        self.values[key] = value
        self.note(f"{old} -> {key}={value!r}")

    def apply(self, rules: Rules) -> None:
        """Translate the keys of `rules`. Raises ConfigError for a value without equivalent."""
        for key, rule in rules.items():
            if (value := self.values.get(key)) is None:
                continue
            if rule is Action.PERCENT:
                if not 0 <= value <= 1:
                    raise ConfigError(f"{self.name}.{key}={value!r} should be in [0, 1] in big_vision")
                self.put(key, round(100 * value, 9), f"{key}={value}")
                continue
            del self.values[key]
            if rule is Action.DROP:
                self.note(f"{key} is dropped: it {rule.value}")
            elif isinstance(rule, str):
                self.values[rule] = value
                self.note(f"{key} -> {rule}")
            elif value not in rule:
                raise ConfigError(f"{self.name}.{key}={value!r} of big_vision has no equivalent")


def is_big_vision(config: Values) -> bool:
    """Return True if a config has keys that only big_vision has, or its form of mixup."""
    return bool(MARKS & config.keys()) or isinstance(config.get("mixup"), Mapping)


def translate(found: Values) -> tuple[Values, list[str]]:
    """Translate a config of big_vision to the keys of dcvit; return it, and a line for each change.

    Raises:
      ConfigError: a value has no equivalent; the message names its key.
    """
    config = Part(found, "config", [])
    try:
        _translate_top(config)
        config.values["input"] = _translate_input(config.inner("input"))
        config.values["model"] = _translate_model(config)
        config.values["optax"] = _translate_optimizer(config)
        config.values["schedule"] = _translate_schedule(config.inner("schedule"))
        config.values["evals"] = evaluators = _translate_evaluators(config.inner("evals"))
        if pp := _pp_predict(evaluators):
            config.put("pp_predict", pp, "preprocessing of an evaluator")
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as e:  # values of unexpected types
        raise ConfigError(f"this config of big_vision cannot be translated: {first_line_with_type(e)}") from e
    return config.values, config.notes


def _translate_top(config: Part) -> None:
    """Translate the keys that are not dicts, and mixup=dict(p=…) to mixup=p."""
    strategy = config.values.get("sharding_strategy")
    config.apply(RULES["config"])
    if strategy == FSDP:
        config.put("mesh", [("fsdp", -1)], "mesh=[('data', -1)]")
        config.put("sharding_strategy", "fsdp", f"sharding_strategy={strategy!r}")
    if "loss" not in config.values:
        config.put("loss", "sigmoid_xent", "big_vision's default")
    if isinstance(config.values.get("mixup"), Mapping):
        mixup = config.inner("mixup")
        weight = mixup.values.pop("p", 0.0)
        mixup.apply(dict.fromkeys(mixup.values, ()))
        config.put("mixup", weight, f"mixup=dict(p={weight})")


def _translate_input(part: Part) -> Values:
    part.apply(RULES["input"])
    raw = part.values.pop("cache_raw", False)
    data = _data(part)
    if raw:
        data.put("cache", True, "cache_raw")
    return {**part.values, "data": data.values, "pp": translate_pp(part, "pp")}


def _data(part: Part) -> Part:
    """Remove the data set of `part` and return it, which is of tensorflow-datasets unless `kind` says otherwise."""
    data = part.inner("data")
    if "kind" not in data.values:
        data.put("kind", "tfds", "big_vision's default")
    return data


def _translate_model(config: Part) -> Values:
    """Return `model` with the initial bias of its head.

    Without `remat_policy`, scanned layers of big_vision save no activations for the backward pass.
    """
    model = config.inner("model")
    if model.values.get("scan"):
        policy = model.values.pop("remat_policy", "none")
        model.put("remat", "nothing_saveable" if policy == "none" else policy, f"remat_policy={policy!r}")
    if (bias := config.values.pop("init_head_bias", None)) is not None:
        model.put("head_bias_init", bias, "config.init_head_bias")
    return model.values


def _translate_optimizer(config: Part) -> Values:
    """Translate `optax_name`, and return its arguments `optax`."""
    name, arguments = config.values.get("optax_name"), config.inner("optax")
    if name in OPTIMIZERS:
        config.put("optax_name", OPTIMIZERS[name], f"optax_name={name!r}")
    if name == "big_vision.momentum_hp":
        arguments.values = {"momentum": 0.9, "dtype": "bfloat16"} | arguments.values
        arguments.apply(RULES["momentum"])
    return arguments.values


def _translate_schedule(schedule: Part) -> Values:
    """Return the schedule, which is a constant without `decay_type`."""
    schedule.apply(RULES["schedule"])
    kind = schedule.values.get("decay_type")
    if kind is None:
        schedule.put("decay_type", "constant", "big_vision's default")
    elif kind in ("linear", "polynomial"):
        schedule.values["decay_type"] = "linear"
        schedule.apply(RULES["linear schedule"])
    return schedule.values


def _translate_evaluators(evals: Part) -> Values:
    """Return the options of each evaluator by its name, which is its type unless it has another."""
    found = Values()
    for name in list(evals.values):
        part = evals.inner(name)
        part.values.setdefault("type", name)
        part.apply(RULES["evaluator"])
        if part.values["type"] == "fewshot_lsr":
            found |= _few_shot(part, name)
        else:
            data, pp = _data(part).values, translate_pp(part, "pp")
            found[name] = {**part.values, "data": data, "pp": pp}
    return found


def _few_shot(part: Part, name: str) -> Values:
    """Return the options of an evaluator for each data set of a few-shot evaluation, by the evaluator's name."""
    datasets = part.inner("datasets").values
    del part.values["type"]
    if part.values.get("pp_train") != part.values.pop("pp_eval", None):
        raise ConfigError(f"{part.name}.pp_train of big_vision has no equivalent: it should equal pp_eval")
    pp = translate_pp(part, "pp_train")
    part.values.setdefault("representation_layer", "logits")
    part.apply(RULES["few-shot evaluator"])
    evaluators = {}
    for key, (dataset, train, test) in datasets.items():
        common = {"kind": "tfds", "name": dataset}
        evaluators[f"{name}_{key}"] = {
            **part.values, "type": "fewshot", "pp": pp,
            "data": {**common, "split": train}, "test_data": {**common, "split": test},
        }  # fmt: skip
    part.note(f"datasets -> the evaluators {', '.join(evaluators)}")
    return evaluators


def translate_pp(part: Part, key: str) -> str:
    """Remove a preprocessing string of big_vision from `part`, and return it with explicit keys in each `onehot`.

    The op has other default keys in big_vision. A string without it is returned unchanged; a missing string is "".

    Raises:
      InputError: the string cannot be parsed.
    """
    from input_pipeline.preprocess import builder, ops  # in functions: configs load without the libraries of images

    pp: str = part.values.pop(key, "")
    found = builder.calls(pp)
    changed = False
    for call in found:
        if ast.unparse(call.func) == "onehot":
            names = [*list(inspect.signature(ops.onehot).parameters)[: len(call.args)], *(k.arg for k in call.keywords)]
            missing = {"key": "labels", "key_result": None}.items()
            added = [ast.keyword(key, ast.Constant(value)) for key, value in missing if key not in names]
            call.keywords += added
            changed = changed or bool(added)
    if not changed:
        return pp
    part.note(f"onehot in {key} -> onehot with big_vision's default keys")
    return "|".join(map(ast.unparse, found))


def _pp_predict(evaluators: Mapping[str, Values]) -> str:
    """Return the preprocessing string of image files for `dcvit predict`: that of `val`, `test` or another, or ""."""
    found = {name: each["pp"] for name, each in evaluators.items() if each["type"] == "classification"}
    names = [*(name for name in ("val", "test") if name in found), *found]
    return without_labels(found[names[0]]) if names else ""


def without_labels(pp: str) -> str:
    """Return a preprocessing string without the ops that concern labels, for images that have none."""
    from input_pipeline.preprocess.builder import calls

    return "|".join(ast.unparse(call) for call in calls(pp) if ast.unparse(call.func) not in ON_LABELS)
