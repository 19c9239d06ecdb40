"""Fields and configs of the language models of other libraries: complete, comparable, and two-way tables of keys."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence

from dcvit.config.keys import TRAINING_ONLY_FIELDS
from dcvit.errors import CheckpointError
from dcvit.weights import config_table, hf_config
from dcvit.weights.config_table import Key
from dcvit.weights.family import Description, defaults
from dcvit.weights.tensors import Json, Tensors

# Fields of `dcvit.models.lm.LM` that files do not hold: they do not change the function of a document, or only where it
# begins.
NOT_IN_FILES = (*TRAINING_ONLY_FIELDS, "end_of_text")
# The others, which determine the parameters and the function, in the order of files.
NAMES = (
    "width", "depth", "mlp_dim", "num_heads", "num_key_heads", "heads", "context", "position", "rotary_fraction",
    "rotary_base", "rotary_scaling", "norm", "norm_epsilon", "mlp", "mlp_groups", "use_bias", "qkv_bias", "parallel",
    "tied", "window_pattern", "window", "prefill_window", "qk_norm", "qk_norm_epsilon", "compose", "branches",
    "projection", "gate", "static", "rank", "groups", "compose_gelu",
)  # fmt: skip
DEFAULTS = defaults("lm", NAMES)


class LMFields(types.SimpleNamespace):
    """The fields `NAMES` of a language model as attributes, with the defaults of `dcvit.models.lm.LM`."""

    width: int
    num_heads: int
    num_key_heads: int | None
    mlp_dim: int | None

    def __init__(self, **fields: object):
        if unknown := fields.keys() - DEFAULTS.keys():
            raise CheckpointError(f"a language model has no field {min(unknown)!r} in files")
        super().__init__(**{**DEFAULTS, **fields})

    @classmethod
    def of(cls, description: Description) -> LMFields:
        """Return the fields of a description in canonical form.

        Raises:
          CheckpointError: the description is not of a language model.
        """
        if description.model_name != "lm":
            raise CheckpointError(f"a model {description.model_name!r} is not a language model")
        fields = {name: value for name, value in description.fields.items() if name not in NOT_IN_FILES}
        return cls(**fields).canonical()

    def canonical(self) -> LMFields:
        """Return fields of the same function: sizes are explicit, and fields without effect have their defaults.

        Raises:
          CheckpointError: the heads do not divide the width, or the key heads the heads.
        """
        if self.width % self.num_heads or self.num_heads % self.key_heads:
            raise CheckpointError(
                f"{self.num_heads} heads should divide the width {self.width}, and {self.key_heads} key heads the heads"
            )
        values: Json = {
            "mlp_dim": self.hidden, "num_key_heads": self.key_heads, "mlp_groups": self.mlp_groups or None,
            "prefill_window": None if self.prefill_window == self.window else self.prefill_window,
            "rotary_fraction": round(self.rotary_fraction * self.head_dim) / self.head_dim,
            "rotary_scaling": self.rotary_scaling and list(self.rotary_scaling),
            "qkv_bias": None if self.qkv_bias == "qkv" * self.use_bias else self.qkv_bias,
        }  # fmt: skip
        without_effect: list[str] = []
        if self.position == "learned":
            without_effect += ["rotary_fraction", "rotary_base", "rotary_scaling"]
        if self.window_pattern == "none":
            without_effect += ["window", "prefill_window"]
        if self.qk_norm is None:
            without_effect += ["qk_norm_epsilon"]
        if self.compose is None:
            without_effect += ["branches", "projection", "gate", "static", "rank", "groups", "compose_gelu"]
        elif not self.projection:
            without_effect += ["rank", "compose_gelu"]
        return LMFields(**vars(self) | values | {name: DEFAULTS[name] for name in without_effect})

    @property
    def head_dim(self) -> int:
        """Return D."""
        return self.width // self.num_heads

    @property
    def key_heads(self) -> int:
        """Return K."""
        return self.num_key_heads or self.num_heads

    @property
    def hidden(self) -> int:
        """Return F."""
        return self.mlp_dim or 4 * self.width

    def describe(self, vocab_size: int) -> Description:
        """Return the description of a model with these fields and V = `vocab_size`."""
        different = {name: value for name, value in vars(self).items() if value != DEFAULTS[name]}
        return Description("lm", vocab_size, different)


@dataclasses.dataclass(frozen=True)
class ConfigTable:
    """Two-way table of the config.json of a family of language models.

    Fields:
      title: the name of the family in messages; "" means that of the class.
      architectures: the class of transformers by `model_type`.
      keys: function from the `model_type` to its keys, besides `vocab_size`, in the order in which they are written.
      constants: function from the `model_type` to the fields that all its models share.
      vocab_sizes: the default of `vocab_size` by `model_type`; without one, the key is required.
      type_of: function from the fields of a model to the `model_type` that is written; by default the first.
    """

    title: str
    architectures: Mapping[str, str]
    keys: Callable[[str], Sequence[Key]]
    constants: Callable[[str], Json]
    vocab_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    type_of: Callable[[LMFields], str] | None = None

    def describe(self, tensors: Tensors, config: Json) -> Description:
        """Return the model of a config.json; see `dcvit.weights.family.Family`."""
        fields = self._read(config)
        return fields.describe(hf_config.size(config, "vocab_size", self.vocab_sizes.get(config["model_type"])))

    def config(self, description: Description) -> Json:
        """Return the content of config.json. Raises CheckpointError if it cannot express a field."""
        fields = LMFields.of(description)
        kind = self.type_of(fields) if self.type_of else next(iter(self.architectures))
        if description.num_outputs is None:
            raise CheckpointError("a language model needs a vocabulary, found num_outputs=None")
        values = {
            "architectures": [self.architectures[kind]], "model_type": kind, "vocab_size": description.num_outputs,
            **config_table.write(self.keys(kind), vars(fields)),
        }  # fmt: skip
        ours, theirs = vars(fields), vars(self._read(values))
        lacking = [f"{name}={value!r} (only {theirs[name]!r})" for name, value in ours.items() if value != theirs[name]]
        if lacking:
            title = self.title or self.architectures[kind]
            raise CheckpointError(f"{title} cannot express {', '.join(lacking)}")
        return values

    def _read(self, config: Json) -> LMFields:
        kind = hf_config.check_type(config, *self.architectures)
        hf_config.check_only(config, is_causal=True)
        return LMFields(**self.constants(kind), **config_table.read(self.keys(kind), config)).canonical()
