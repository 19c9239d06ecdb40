"""Translation of data, preprocessing and evaluators of big_vision, whose op `onehot` has other default keys."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping

from dcvit.config.big_vision.part import Part, Values
from dcvit.errors import ConfigError

NO_EFFECT_INPUT = ("shuffle_buffer_size", "num_parallel_calls", "prefetch")
NO_EFFECT = ("prefix", "skip_first", "display_first", "prefetch", "cache", "cache_final", "cache_raw")
ON_LABELS = ("onehot", "keep", "drop")  # ops that an image file without label does not need


def translate_input(part: Part) -> Values:
    """Return the translated `config.input`."""
    part.drop(NO_EFFECT_INPUT)
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


def translate_evaluators(config: Part) -> Values:
    """Return the translated options of each evaluator of `evals`, by the evaluator's name."""
    found, evaluators = config.inner("evals"), Values()
    for name in list(found.values):
        part = found.inner(name)
        if part.values.get("type", name) == "fewshot_lsr":
            evaluators |= _few_shot(part, name)
        else:
            evaluators[name] = _classification(part, name)
    return evaluators


def pp_predict(evaluators: Mapping[str, Values]) -> str:
    """Return the preprocessing string of image files for `dcvit predict`: that of `val`, `test` or another, or ""."""
    found = {name: each["pp"] for name, each in evaluators.items() if each["type"] == "classification"}
    names = [*(name for name in ("val", "test") if name in found), *found]
    return without_labels(found[names[0]]) if names else ""


def _classification(part: Part, name: str) -> Values:
    """Return the options of an evaluator, whose type is `name` unless it has another."""
    part.durations(["log"])
    part.drop(NO_EFFECT)
    part.values.setdefault("type", name)
    part.rename("loss_name", "loss")
    data, pp = _data(part).values, translate_pp(part, "pp_fn")
    part.note("pp_fn -> pp")
    return {**part.values, "data": data, "pp": pp}


def _few_shot(part: Part, name: str) -> Values:
    """Return the options of an evaluator for each data set of a few-shot evaluation, by the evaluator's name."""
    part.values.pop("type", None)
    part.durations(["log"])
    part.drop(NO_EFFECT)
    datasets = part.inner("datasets").values
    if part.values.get("pp_train") != part.values.pop("pp_eval", None):
        raise ConfigError(f"{part.name}.pp_train of big_vision has no equivalent: it should equal pp_eval")
    pp = translate_pp(part, "pp_train")
    part.values.setdefault("representation_layer", "logits")
    part.rename("representation_layer", "representation")
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

    A string without this op is returned unchanged; a missing string is "".

    Raises:
      InputError: the string cannot be parsed.
    """
    from input_pipeline.preprocess import builder, ops  # in functions: configs load without the libraries of images

    pp: str = part.values.pop(key, "")
    found = builder.calls(pp)
    changed = False
    for call in found:
        if _name(call) == "onehot":
            names = [*list(inspect.signature(ops.onehot).parameters)[: len(call.args)], *(k.arg for k in call.keywords)]
            missing = {"key": "labels", "key_result": None}.items()
            added = [ast.keyword(key, ast.Constant(value)) for key, value in missing if key not in names]
            call.keywords += added
            changed = changed or bool(added)
    if not changed:
        return pp
    part.note(f"onehot in {key} -> onehot with big_vision's default keys")
    return "|".join(map(ast.unparse, found))


def without_labels(pp: str) -> str:
    """Return a preprocessing string without the ops that concern labels, for images that have none."""
    from input_pipeline.preprocess.builder import calls

    return "|".join(ast.unparse(call) for call in calls(pp) if _name(call) not in ON_LABELS)


def _name(call: ast.Call) -> str:
    """Return the name of an op; "" if the function of the call is not a name."""
    return call.func.id if isinstance(call.func, ast.Name) else ""
