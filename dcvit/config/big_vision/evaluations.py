"""Translation of data, preprocessing and evaluators of big_vision, whose op `onehot` has other default keys."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping

from dcvit.config.big_vision.part import Part, Values
from dcvit.errors import ConfigError, InputError

NO_EFFECT = {
    "prefix": "metrics have the evaluator's name",
    "skip_first": "every evaluator also runs before the first step",
    "display_first": "all metrics are shown",
    "prefetch": "batches are prefetched",
    "cache_final": "batches are computed again",
    "cache_raw": "examples are read again",
}
CACHES = ("none", "pipeline", "raw_data", "final_data", "final")
EVALUATORS = ("classification", "fewshot_lsr")
ON_LABELS = ("onehot", "keep", "drop")  # ops that an image file without label does not need


def translate_data(data: Part, *, cache: bool = False) -> Values:
    """Return the translated arguments of a data set, which is of tensorflow-datasets unless `kind` says otherwise.

    Raises:
      ConfigError: a data set of big_vision's own, or several.
    """
    name = data.values.get("name")
    if "kind" not in data.values:
        if not isinstance(name, str):
            raise ConfigError(f"{data.name}={data.values!r} should have the name and split of one data set")
        if name.startswith("bv:") or name == "from_data_dir":
            raise data.refuse("name", "expected a data set of tensorflow-datasets")
        if "image" not in data.values.get("skip_decode", ("image",)):
            raise data.refuse("skip_decode", "images stay encoded, and `pp` decodes them")
        data.drop({"skip_decode": "all images stay encoded"})
        data.values = {"kind": "tfds", **data.values}
        data.note("kind='tfds' is added")
    if cache:
        data.put("cache", True, "cached raw data")
    return data.values


def translate_evaluators(config: Part) -> Values:
    """Return the translated options of each evaluator of `evals` and `fewshot`, by the evaluator's name.

    Raises:
      ConfigError: an evaluator has no equivalent.
    """
    found, evaluators = config.inner("evals"), Values()
    for name in list(found.values):
        part = found.inner(name)
        kind = part.values.pop("type", name)
        part.durations({"log": "log"})
        part.drop(NO_EFFECT)
        part.expect("pred_kw", ({},), "models take no further arguments")
        if "batch_size_eval" in config.values and "batch_size" not in part.values:
            part.put("batch_size", config.values["batch_size_eval"], "config.batch_size_eval")
        if kind == "fewshot_lsr":
            evaluators |= _few_shot(part, name)
        else:
            evaluators[name] = _classification(part, kind)
    config.values.pop("batch_size_eval", None)
    if "fewshot" in config.values:
        part = config.inner("fewshot")
        part.values.pop("type", None)
        part.durations({"log": "log"})
        part.drop(NO_EFFECT)
        part.note("missing data sets are skipped, because big_vision's trainer does not read this key")
        evaluators |= {name: {**each, "optional": True} for name, each in _few_shot(part, "fewshot").items()}
    return evaluators


def pp_predict(evaluators: Mapping[str, Values]) -> str:
    """Return the preprocessing string of image files for `dcvit predict`: that of an evaluator, or ""."""
    found = {name: each["pp"] for name, each in evaluators.items() if each["type"] == "classification" and each["pp"]}
    names = [*(name for name in ("val", "test") if name in found), *found]
    return without_labels(found[names[0]]) if names else ""


def _classification(part: Part, kind: str) -> Values:
    """Return the options of an evaluator, whose type in big_vision is `kind`."""
    if kind not in EVALUATORS:
        raise ConfigError(f"{part.name}.type={kind!r} of big_vision has no equivalent; known: {', '.join(EVALUATORS)}")
    part.expect("pred", ("predict",), "expected 'predict'")
    part.expect("label_key", ("labels",), "the key of the labels is 'labels'")
    part.rename("loss_name", "loss")
    pp = translate_pp(part, "pp_fn")
    part.note("pp_fn -> pp")
    cache = part.values.pop("cache", "none")
    if cache not in CACHES:
        raise ConfigError(f"{part.name}.cache={cache!r}; known: {', '.join(CACHES)}")
    if cache in ("final", "final_data"):
        part.put("cache", True, f"cache={cache!r}")
    data = translate_data(part.inner("data"), cache=cache == "raw_data")
    return {"type": "classification", "data": data, "pp": pp, **part.values}


def _few_shot(part: Part, name: str) -> Values:
    """Return the options of an evaluator for each data set of a few-shot evaluation, by the evaluator's name."""
    part.expect("label_key", ("label",), "the key of the label is 'label'")
    part.expect("mask_key", ("_mask",), "the key of the mask is '_mask'")
    part.expect("pred", ("predict",), "expected 'predict'")
    datasets, folder = part.inner("datasets").values, part.values.pop("data_dir", None)
    if part.values.get("pp_train") != part.values.get("pp_eval"):
        raise part.refuse("pp_train", "pp_train and pp_eval should be equal")
    pp = translate_pp(part, "pp_train")
    part.values.pop("pp_eval", None)
    layer = part.values.pop("representation_layer", "logits")
    part.note(f"representation_layer -> representation={layer!r}, pp_train and pp_eval -> pp")
    evaluators = {}
    for key, splits in datasets.items():
        if not isinstance(splits, list | tuple) or len(splits) != 3:
            raise ConfigError(f"{part.name}.datasets.{key}={splits!r} should be (data set, training split, test split)")
        common = {"kind": "tfds", "name": splits[0], **({"data_dir": folder} if folder else {})}
        evaluators[f"{name}_{key}"] = {
            "type": "fewshot", "data": {**common, "split": splits[1]}, "test_data": {**common, "split": splits[2]},
            "pp": pp, "representation": layer, **part.values,
        }  # fmt: skip
    part.note(f"datasets -> the evaluators {', '.join(evaluators)}")
    return evaluators


def translate_pp(part: Part, key: str) -> str:
    """Remove a preprocessing string of big_vision from `part`, and return it with explicit keys in each `onehot`.

    A string without this op is returned unchanged; a missing string is "".

    Raises:
      ConfigError: the value is not a string, or it cannot be parsed.
    """
    from input_pipeline.preprocess import ops  # in functions: configs of dcvit load without the libraries of images

    pp = part.values.pop(key, "")
    found = _calls(pp, f"{part.name}.{key}")
    changed = False
    for call in found:
        if _name(call) == "onehot":
            names = [*list(inspect.signature(ops.onehot).parameters)[: len(call.args)], *(k.arg for k in call.keywords)]
            missing = {"key": "labels", "key_result": None}.items()
            added = [ast.keyword(key, ast.Constant(value)) for key, value in missing if key not in names]
            call.keywords += added
            changed = changed or bool(added)
    if not changed:
        return str(pp)
    part.note(f"onehot in {key} -> onehot with big_vision's default keys")
    return "|".join(map(ast.unparse, found))


def without_labels(pp: str) -> str:
    """Return a preprocessing string without the ops that concern labels, for images that have none."""
    from input_pipeline.preprocess.builder import calls

    return "|".join(ast.unparse(call) for call in calls(pp) if _name(call) not in ON_LABELS)


def _calls(pp: object, what: str) -> list[ast.Call]:
    """Return the syntax trees of a preprocessing string's ops. Raises ConfigError if it cannot be parsed."""
    from input_pipeline.preprocess.builder import calls

    if not isinstance(pp, str):
        raise ConfigError(f"{what}={pp!r} should be of type str")
    try:
        return calls(pp)
    except InputError as e:
        raise ConfigError(f"{what}: {e}") from None


def _name(call: ast.Call) -> str:
    """Return the name of an op; "" if the function of the call is not a name."""
    return call.func.id if isinstance(call.func, ast.Name) else ""
