"""Translation of a config of big_vision to the keys of dcvit.

Keys of big_vision are kept, renamed or converted so that the result is the same. Keys in `NO_EFFECT`, which concern the
speed of big_vision's own input pipeline or the look of its output, are dropped. Keys without translation stay, and are
an error where dcvit does not know them, either.
"""

from __future__ import annotations

from collections.abc import Mapping

from dcvit.config.big_vision.evaluations import pp_predict, translate_evaluators, translate_input
from dcvit.config.big_vision.part import Part, Values
from dcvit.config.keys import UNITS
from dcvit.errors import ConfigError, first_line_with_type

NO_EFFECT = ("pp_modules", "prefetch_to_device", "ckpt_timeout", "fewshot")
# Keys of which dcvit has none, so that a config with one of them is one of big_vision.
MARKS = {*NO_EFFECT, "init_head_bias", *(f"log_training_{unit}" for unit in UNITS)}
FSDP = [(".*", 'fsdp(axis="data")')]


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
        for unit in UNITS:
            config.rename(f"log_training_{unit}", f"log_{unit}")
        config.durations(["total", "log", "ckpt", "keep_ckpt"])
        config.drop(NO_EFFECT)
        config.values["input"] = translate_input(config.inner("input"))
        _translate_model(config)
        if "loss" not in config.values:
            config.put("loss", "sigmoid_xent", "big_vision's default")
        _translate_mixup(config)
        _translate_optimizer(config)
        _translate_schedule(config)
        _translate_mesh(config)
        config.values["evals"] = translate_evaluators(config)
        if pp := pp_predict(config.values["evals"]):
            config.put("pp_predict", pp, "preprocessing of an evaluator")
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as e:  # values of unexpected types
        raise ConfigError(f"this config of big_vision cannot be translated: {first_line_with_type(e)}") from e
    return config.values, config.notes


def _translate_model(config: Part) -> None:
    """Translate `model`, and the initial bias of its head.

    Without `remat_policy`, scanned layers of big_vision save no activations for the backward pass.
    """
    model = config.inner("model")
    if model.values.get("scan"):
        policy = model.values.pop("remat_policy", "none")
        model.put("remat", "nothing_saveable" if policy == "none" else policy, f"remat_policy={policy!r}")
    if (bias := config.values.pop("init_head_bias", None)) is not None:
        model.put("head_bias_init", bias, "config.init_head_bias")
    config.values["model"] = model.values


def _translate_mixup(config: Part) -> None:
    """Translate mixup=dict(p=…) to mixup=p. Raises ConfigError if the dict has other keys."""
    if not isinstance(config.values.get("mixup"), Mapping):
        return
    mixup = config.inner("mixup")
    weight = mixup.values.pop("p", 0.0)
    for key in list(mixup.values):
        mixup.expect(key, ())
    config.put("mixup", weight, f"mixup=dict(p={weight})")


def _translate_optimizer(config: Part) -> None:
    """Translate the optimizer: `optax_name` and its arguments in `optax`."""
    name, arguments = config.values.get("optax_name"), config.inner("optax")
    if name == "big_vision.momentum_hp":
        config.put("optax_name", "trace", f"optax_name={name!r}")
        arguments.values.setdefault("momentum", 0.9)
        arguments.values.setdefault("dtype", "bfloat16")
        arguments.rename("momentum", "decay")
        arguments.rename("dtype", "accumulator_dtype")
    elif name == "big_vision.scale_by_adafactor":
        config.put("optax_name", "scale_by_adafactor", f"optax_name={name!r}")
    config.values["optax"] = arguments.values


def _translate_schedule(config: Part) -> None:
    """Translate `schedule`, which is a constant without `decay_type`."""
    schedule = config.inner("schedule")
    schedule.durations(["warmup", "cooldown"])
    kind = schedule.values.get("decay_type")
    if kind is None:
        schedule.put("decay_type", "constant", "big_vision's default")
    elif kind in ("linear", "polynomial"):
        schedule.expect("power", (1,))
        schedule.values["decay_type"] = "linear"
        schedule.rename("linear_end", "end")
    config.values["schedule"] = schedule.values


def _translate_mesh(config: Part) -> None:
    """Translate a mesh of one axis with replicated or fully sharded parameters. Raises ConfigError for others."""
    config.expect("mesh", ([("data", -1)],))
    config.expect("sharding_rules", ([("act_batch", "data")], [("act_batch", ("data",))]))
    strategy = config.values.get("sharding_strategy")
    config.expect("sharding_strategy", ([(".*", "replicate")], FSDP))
    if strategy == FSDP:
        config.put("mesh", [("fsdp", -1)], "mesh=[('data', -1)]")
        config.put("sharding_strategy", "fsdp", f"sharding_strategy={strategy!r}")
