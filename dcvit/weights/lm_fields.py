"""Fields of language models in a form that can be compared, and two-way tables of other libraries' config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcvit.errors import CheckpointError
from dcvit.models.fields import TRAINING_ONLY_FIELDS
from dcvit.weights import config_table, hf_config
from dcvit.weights.config_table import Key
from dcvit.weights.family import Description, defaults
from dcvit.weights.tensors import Json, Tensors

# Fields of `dcvit.models.lm.LM` that files do not hold: they do not change the function of a document, or only where it
# begins.
NOT_IN_FILES = (*TRAINING_ONLY_FIELDS, "end_of_text")
DEFAULTS = defaults("lm", "end_of_text")  # of the others, which determine the parameters and the function


def canonical(fields: Mapping[str, Any]) -> Json:
    """Return all fields of a language model: sizes are explicit, and fields without effect have their defaults.

    Raises:
      CheckpointError: a field is unknown in files, the heads do not divide the width, or the key heads the heads.
    """
    if unknown := fields.keys() - DEFAULTS.keys():
        raise CheckpointError(f"a language model has no field {min(unknown)!r} in files")
    found = {**DEFAULTS, **fields}
    width, heads = found["width"], found["num_heads"]
    keys = found["num_key_heads"] or heads
    if width % heads or heads % keys:
        raise CheckpointError(f"{heads} heads should divide the width {width}, and {keys} key heads the heads")
    head_dim = width // heads
    found |= {
        "mlp_dim": found["mlp_dim"] or 4 * width, "num_key_heads": keys, "mlp_groups": found["mlp_groups"] or None,
        "prefill_window": None if found["prefill_window"] == found["window"] else found["prefill_window"],
        "rotary_fraction": round(found["rotary_fraction"] * head_dim) / head_dim,
        "rotary_scaling": found["rotary_scaling"] and list(found["rotary_scaling"]),
        "qkv_bias": None if found["qkv_bias"] == "qkv" * found["use_bias"] else found["qkv_bias"],
    }  # fmt: skip
    without_effect: list[str] = []
    if found["position"] == "learned":
        without_effect += ["rotary_fraction", "rotary_base", "rotary_scaling"]
    if found["window_pattern"] == "none":
        without_effect += ["window", "prefill_window"]
    if found["qk_norm"] is None:
        without_effect += ["qk_norm_epsilon"]
    if found["compose"] is None:
        without_effect += ["branches", "projection", "gate", "static", "rank", "groups", "compose_gelu"]
    elif not found["projection"]:
        without_effect += ["rank", "compose_gelu"]
    return found | {name: DEFAULTS[name] for name in without_effect}


@dataclasses.dataclass(frozen=True)
class ConfigTable:
    """Two-way table of the config.json of a family of language models.

    Fields:
      title: the name of the family in messages; "" means the name of the class.
      architectures: the class of transformers by `model_type`.
      keys: function from the `model_type` to its keys, without `vocab_size`, in the order in which they are written.
      constants: function from the `model_type` to the fields that are the same for all its models.
      vocab_sizes: the default of `vocab_size` by `model_type`; without one, the key is required.
      type_of: function from the fields of a model to the `model_type` that is written; by default the first.
    """

    title: str
    architectures: Mapping[str, str]
    keys: Callable[[str], Sequence[Key]]
    constants: Callable[[str], Json]
    vocab_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    type_of: Callable[[Json], str] | None = None

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the description of the model of a config.json; see `dcvit.weights.family.Family`."""
        fields = self._read(config)
        vocab_size = hf_config.size(config, "vocab_size", self.vocab_sizes.get(config["model_type"]))
        return Description("lm", vocab_size, {name: x for name, x in fields.items() if x != DEFAULTS[name]})

    def config(self, description: Description) -> Json:
        """Return the content of config.json. Raises CheckpointError if no key can express a field's value."""
        if description.model_name != "lm":
            raise CheckpointError(f"a model {description.model_name!r} is not a language model")
        fields = canonical({name: x for name, x in description.fields.items() if name not in NOT_IN_FILES})
        kind = self.type_of(fields) if self.type_of else next(iter(self.architectures))
        if description.num_outputs is None:
            raise CheckpointError("a language model needs a vocabulary, found num_outputs=None")
        values = {
            "architectures": [self.architectures[kind]], "model_type": kind, "vocab_size": description.num_outputs,
            **config_table.write(self.keys(kind), fields),
        }  # fmt: skip
        theirs = self._read(values)
        lacking = [f"{name}={x!r} (only {theirs[name]!r})" for name, x in fields.items() if x != theirs[name]]
        if lacking:
            title = self.title or self.architectures[kind]
            raise CheckpointError(f"{title} cannot express {', '.join(lacking)}")
        return values

    def _read(self, config: Json) -> Json:
        kind = hf_config.check_type(config, *self.architectures)
        hf_config.check_only(config, is_causal=True)
        return canonical({**self.constants(kind), **config_table.read(self.keys(kind), config)})
