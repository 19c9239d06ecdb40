"""Translation of a config of big_vision to the keys of dcvit.

Keys of big_vision are kept, renamed or converted so that the result is the same, or are an error. Keys in `NO_EFFECT`,
which concern the speed of big_vision's own input pipeline or the look of its output, are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dcvit.config.big_vision.evaluations import pp_predict, translate_data, translate_evaluators, translate_pp
from dcvit.config.big_vision.part import Part, Values
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
CONSTANT = "stair"  # the default `decay_type` of big_vision, without steps a constant
REPLICATED = [(".*", "replicate")]
FSDP = re.compile(r"""\[\('\.\*', .fsdp\(axis=["']data["'](, min_size_to_shard_mb=[\d.]+)?\).\)\]""")  # its repr


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
    """Translate a config of big_vision to the keys of dcvit; return it, and a line for each change.

    Raises:
      ConfigError: a key or value has no equivalent; the message names it.
    """
    config = Part(found, "config", {})
    try:
        _translate(config)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as e:  # values of unexpected types
        raise ConfigError(f"this config of big_vision cannot be translated: {first_line_with_type(e)}") from e
    return config.values, [f"{', '.join(parts)}: {text}" for text, parts in config.notes.items()]


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
    _translate_optimizer(config)
    _translate_schedule(config)
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
    part.values["pp"] = translate_pp(part, "pp")
    config.values["input"] = part.values


def _translate_model(config: Part) -> None:
    """Translate `model`, and the initial bias of its head.

    `remat_policy` has an effect on scanned layers only; without one, these save no activations for the backward pass.
    """
    model = config.inner("model")
    policy = model.values.pop("remat_policy", None)
    if model.values.get("scan"):
        remat = "nothing_saveable" if policy in (None, "none") else policy
        model.put("remat", remat, f"remat_policy={policy!r}" if policy else "")
    elif policy:
        model.note("remat_policy is dropped: it concerns scanned layers only")
    if (bias := config.values.pop("init_head_bias", None)) is not None:
        model.put("head_bias_init", bias, f"config.init_head_bias={bias}")
    config.values["model"] = model.values


def _translate_mixup(config: Part) -> None:
    """Translate mixup=dict(p=…) to mixup=p. Raises ConfigError if the dict has other keys or unknown values."""
    if not isinstance(config.values.get("mixup"), Mapping):
        return
    mixup = config.inner("mixup")
    mixup.expect("fold_in", (), "all devices mix with the same weight")
    mixup.expect("n", (2,), "two examples are mixed")
    weight = mixup.values.pop("p", 0.0)
    if mixup.values:
        raise mixup.refuse(next(iter(mixup.values)), "mixup has the key p only")
    config.put("mixup", weight, f"mixup=dict(p={weight})")


def _translate_optimizer(config: Part) -> None:
    """Translate the optimizer: `optax_name`, its arguments in `optax`, clipping and the kind of weight decay.

    Raises:
      ConfigError: the optimizer or an argument has no equivalent.
    """
    name = config.values.get("optax_name")
    arguments = config.inner("optax")
    if name in ("big_vision.sgd", "identity"):
        config.put("optax_name", "trace", f"optax_name={name!r}")
        arguments.put("decay", 0.0, "no momentum")
    elif name == "big_vision.momentum_hp":
        config.put("optax_name", "trace", f"optax_name={name!r}")
        for old, new, default in (("momentum", "decay", 0.9), ("dtype", "accumulator_dtype", "bfloat16")):
            arguments.put(new, arguments.values.pop(old, default), old)
    elif isinstance(name, str) and name.startswith("big_vision."):
        config.put("optax_name", name.removeprefix("big_vision."), f"optax_name={name!r}")
    config.values["optax"] = arguments.values
    if not config.values.get("grad_clip_norm"):  # 0 and False also mean no clipping
        config.values.pop("grad_clip_norm", None)
    config.expect("weight_decay_decouple", (True,), "the weight decay is always decoupled")


def _translate_schedule(config: Part) -> None:
    """Translate `schedule`. Raises ConfigError for a schedule that dcvit has no equivalent of."""
    if isinstance(config.values.get("schedule"), list | tuple):
        raise config.refuse("schedule", "there is one schedule, with `lr_mults` and `frozen`")
    schedule = config.inner("schedule")
    schedule.durations({name: name for name in ("warmup", "cooldown")})
    kind = schedule.values.setdefault("decay_type", CONSTANT)
    if kind == CONSTANT:
        for key in ("steps", "mults"):
            schedule.expect(key, ([], ()), "decay_type='stair' is only known as a constant")
        schedule.put("decay_type", "constant", "decay_type='stair' without steps")
    elif kind == "polynomial":
        schedule.put("decay_type", "linear", "decay_type='polynomial'")
    schedule.expect("power", (1,), "a linear decay has power 1")
    schedule.expect("shift", (0,), "decay_type='rsqrt' has no shift")
    schedule.rename("linear_end", "end")
    if kind not in ("linear", "polynomial"):
        schedule.drop({"end": f"decay_type={kind!r} of big_vision ends at its own value"})
    config.values["schedule"] = schedule.values


def _translate_mesh(config: Part) -> None:
    """Translate a mesh of one axis with replicated or fully sharded parameters. Raises ConfigError for others."""
    config.expect("mesh", ([("data", -1)],), "expected [('data', -1)]")
    rules = ([("act_batch", "data")], [("act_batch", ("data",))])
    config.expect("sharding_rules", rules, "expected act_batch only, which is split over all devices")
    strategy = config.values.get("sharding_strategy", REPLICATED)
    if strategy != REPLICATED and not FSDP.fullmatch(repr(strategy)):
        raise config.refuse("sharding_strategy", """expected [('.*', 'replicate')] or [('.*', 'fsdp(axis="data")')]""")
    config.values.pop("sharding_strategy", None)
    if strategy != REPLICATED:
        config.put("mesh", [("fsdp", -1)], "mesh=[('data', -1)]")
        config.put("sharding_strategy", "fsdp", f"sharding_strategy={strategy!r}")
