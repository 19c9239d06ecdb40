"""Translation of a config of big_vision to the keys of dcvit.

Every key keeps its effect on the result, gets another name, or is an error. Keys in `NO_EFFECT`, which concern the
speed of big_vision's own input pipeline or the look of its output, are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dcvit.config.big_vision import preprocessing
from dcvit.config.big_vision.evaluations import pp_predict, translate_data, translate_evaluators
from dcvit.config.big_vision.optimization import translate_optimizer, translate_schedule
from dcvit.config.big_vision.part import Notes, Part, Values
from dcvit.config.keys import UNITS
from dcvit.errors import ConfigError, first_line_with_type

NO_EFFECT = {
    "pp_modules": "all preprocessing ops are known",
    "prefetch_to_device": "batches are prefetched",
    "prefetch_to_host": "batches are prefetched",
    "ckpt_timeout": "checkpoints are saved in the background",
    "mesh_allow_split_physical_axes": "the order of the devices is that of JAX",
}
NO_EFFECT_INPUT = {
    "shuffle_buffer_size": "all examples are shuffled",
    "num_parallel_calls": "the number of threads is that of the processors",
    "prefetch": "batches are prefetched",
}
UNSUPPORTED = {
    "resume": "a run resumes from its own workdir; `model_init` starts from the parameters of another run",
    "eval_only": "use `dcvit evaluate`",
    "dataset": "configs before 2023, without config.input, are not read",
    "train_split": "configs before 2023, without config.input, are not read",
}
UNSUPPORTED_INPUT = {
    "pre_filter_fn": "all examples of a split are used",
    "post_filter_fn": "all examples of a split are used",
    "pack": "images are not packed",
}
DURATIONS = {"total": "total", "log_training": "log", "ckpt": "ckpt", "keep_ckpt": "keep_ckpt"}
# Keys of which dcvit has none, so that a config with one of them is one of big_vision.
MARKS = {*NO_EFFECT, "init_head_bias", "fewshot", *(f"log_training_{unit}" for unit in UNITS)}
FSDP = re.compile(r"""fsdp\(\s*(?:axis\s*=\s*)?(['"])data\1\s*(?:,\s*min_size_to_shard_mb\s*=\s*[\d.]+\s*)?\)""")


def is_big_vision(config: Values) -> bool:
    """Return True if a config has keys that only big_vision has, or its form of mixup or data."""
    evaluators = config.get("evals")
    holders = [config.get("input"), *(evaluators.values() if isinstance(evaluators, Mapping) else ())]
    data = [holder.get("data") for holder in holders if isinstance(holder, Mapping)]
    return (
        bool(MARKS & config.keys())
        or isinstance(config.get("mixup"), Mapping)
        or str(config.get("optax_name")).startswith("big_vision.")
        or any(isinstance(each, Mapping) and "name" in each and "kind" not in each for each in data)
    )


def translate(found: Values) -> tuple[Values, list[str]]:
    """Return a config of big_vision with the keys of dcvit, and a line for each change.

    Raises:
      ConfigError: a key or value has no equivalent; the message names it.
    """
    config = Part(found, "config", Notes())
    try:
        _translate(config)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as e:  # values of unexpected types
        raise ConfigError(f"this config of big_vision cannot be translated: {first_line_with_type(e)}") from e
    return config.values, config.notes.lines()


def _translate(config: Part) -> None:
    """Translate the keys of a config in place."""
    for key, reason in UNSUPPORTED.items():
        if config.values.get(key):
            raise config.refuse(key, reason)
        config.values.pop(key, None)
    config.durations(DURATIONS)
    config.drop(NO_EFFECT)
    _translate_input(config)
    _translate_model(config)
    if "loss" not in config.values:
        config.put("loss", "sigmoid_xent")
    _translate_mixup(config)
    translate_optimizer(config)
    translate_schedule(config)
    _translate_mesh(config)
    evaluators = translate_evaluators(config)
    config.values["evals"] = evaluators
    if pp := pp_predict(evaluators):
        config.put("pp_predict", pp, "preprocessing of an evaluator")


def _translate_input(config: Part) -> None:
    """Translate `input`. Raises ConfigError for a mixture of data sets, and for filters."""
    part = config.inner("input")
    part.drop(NO_EFFECT_INPUT)
    for key, reason in UNSUPPORTED_INPUT.items():
        if part.values.get(key):
            raise part.refuse(key, reason)
        part.values.pop(key, None)
    raw, cache = part.values.pop("cache_raw", False), part.values.get("cache", "none")
    part.expect("cache", ("none", "pipeline", "raw_data"), "only the examples as they are stored can be kept in memory")
    if part.values.pop("skip_errors", False):
        part.put("corrupt", "skip", "skip_errors")
    part.values["data"] = translate_data(part.inner("data"), cache=bool(raw) or cache == "raw_data")
    part.values["pp"] = preprocessing.translate_pp(part, "pp")
    config.values["input"] = part.values


def _translate_model(config: Part) -> None:
    """Translate `model`, and the initial bias of its head."""
    model = config.inner("model")
    _translate_remat(model)
    if (bias := config.values.pop("init_head_bias", None)) is not None:
        model.put("head_bias_init", bias, f"config.init_head_bias={bias}")
    config.values["model"] = model.values


def _translate_remat(model: Part) -> None:
    """Translate `remat_policy`, of scanned layers: those of big_vision keep nothing unless JAX has the policy."""
    policy = model.values.pop("remat_policy", None)
    if model.values.get("scan"):
        remat = "nothing_saveable" if policy in (None, "none") else policy
        model.put("remat", remat, f"remat_policy={policy!r}" if policy else "")
    elif policy:
        model.note("remat_policy is dropped: it concerns scanned layers only")


def _translate_mixup(config: Part) -> None:
    """Translate mixup=dict(p=…) to its number."""
    if not isinstance(config.values.get("mixup"), Mapping):
        return
    mixup = config.inner("mixup")
    mixup.expect("fold_in", (), "all devices mix with the same weight")
    mixup.expect("n", (2,), "two examples are mixed")
    weight = mixup.values.pop("p", 0.0)
    if mixup.values:
        raise mixup.refuse(next(iter(mixup.values)), "mixup has the key p only")
    config.put("mixup", weight, f"mixup=dict(p={weight})")


def _translate_mesh(config: Part) -> None:
    """Translate a mesh of one axis with replicated or fully sharded parameters. Raises ConfigError for others."""
    rules = config.values.get("sharding_rules", [("act_batch", "data")])
    config.drop({"sharding_rules": "a batch is split over all devices"})
    if repr(rules) not in ("[('act_batch', 'data')]", "[('act_batch', ('data',))]"):
        raise ConfigError(f"config.sharding_rules={rules!r} of big_vision has no equivalent; expected act_batch only")
    strategy = config.values.pop("sharding_strategy", [(".*", "replicate")])
    rules = strategy if isinstance(strategy, list | tuple) else []
    tactics = [str(rule[1]) for rule in rules if isinstance(rule, list | tuple) and len(rule) == 2 and rule[0] == ".*"]
    sharded = len(rules) == 1 and bool(tactics) and bool(FSDP.fullmatch(tactics[0]))
    if not sharded and tactics != ["replicate"]:
        raise ConfigError(
            f"config.sharding_strategy={strategy!r} of big_vision has no equivalent; expected "
            """[('.*', 'replicate')] or [('.*', 'fsdp(axis="data")')]"""
        )
    mesh = config.values.pop("mesh", [("data", -1)])
    pairs = isinstance(mesh, list | tuple) and all(isinstance(axis, list | tuple) and len(axis) == 2 for axis in mesh)
    if not pairs or len(mesh) != 1 or mesh[0][0] != "data":
        raise ConfigError(f"config.mesh={mesh!r} of big_vision has no equivalent; expected [('data', N)]")
    if sharded:
        config.put("mesh", [("fsdp", mesh[0][1])], f"mesh={mesh!r}")
        config.put("sharding_strategy", "fsdp", f"sharding_strategy={strategy!r}")
    elif mesh[0][1] != -1:
        config.values["mesh"] = [tuple(axis) for axis in mesh]
