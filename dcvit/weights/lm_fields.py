"""Fields of the language models, for files of other libraries: complete, comparable, and checked against a format."""

from __future__ import annotations

import dataclasses
from typing import Any

from dcvit.config.keys import TRAINING_ONLY_FIELDS
from dcvit.errors import CheckpointError
from dcvit.weights.family import Description

# Fields of `dcvit.models.lm.LM` that files do not hold: they do not change the function of a document, or only where it
# begins.
NOT_IN_FILES = (*TRAINING_ONLY_FIELDS, "end_of_text")


@dataclasses.dataclass(frozen=True)
class LMFields:
    """The fields of `dcvit.models.lm.LM` that determine its parameters and its function, with the same defaults."""

    width: int = 768
    depth: int = 12
    mlp_dim: int | None = None
    num_heads: int = 12
    num_key_heads: int | None = None
    heads: str | None = None
    context: int = 2048
    position: str = "rotary"
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-6
    mlp: str = "swiglu"
    mlp_groups: int | None = None
    use_bias: bool = False
    parallel: bool = False
    tied: bool = False
    window_pattern: str = "none"
    window: int = 256
    prefill_window: int | None = None
    qk_norm: str | None = None
    qk_norm_epsilon: float = 1e-6
    compose: str | None = None
    branches: str = "qk"
    projection: bool = True
    gate: bool = True
    static: bool = False
    rank: int = 2
    groups: int = 1
    compose_gelu: str = "tanh"

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
        values: dict[str, Any] = {
            "mlp_dim": self.hidden, "num_key_heads": self.key_heads, "mlp_groups": self.mlp_groups or None,
            "prefill_window": None if self.prefill_window == self.window else self.prefill_window,
            "rotary_fraction": round(self.rotary_fraction * self.head_dim) / self.head_dim,
        }  # fmt: skip
        without_effect: list[str] = []
        if self.position == "learned":
            without_effect += ["rotary_fraction", "rotary_base"]
        if self.window_pattern == "none":
            without_effect += ["window", "prefill_window"]
        if self.qk_norm is None:
            without_effect += ["qk_norm_epsilon"]
        if self.compose is None:
            without_effect += ["branches", "projection", "gate", "static", "rank", "groups", "compose_gelu"]
        elif not self.projection:
            without_effect += ["rank", "compose_gelu"]
        return dataclasses.replace(self, **values | {name: getattr(DEFAULTS, name) for name in without_effect})

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
        fields: dict[str, Any] = dataclasses.asdict(self)
        different = {name: value for name, value in fields.items() if value != getattr(DEFAULTS, name)}
        return Description("lm", vocab_size, different)


DEFAULTS = LMFields()


def vocab_size(description: Description) -> int:
    """Return V. Raises CheckpointError for a model without a head."""
    if description.num_outputs is None:
        raise CheckpointError("a language model needs a vocabulary, found num_outputs=None")
    return description.num_outputs


def check_expressible(fields: LMFields, expressed: LMFields, what: str) -> None:
    """Check that a format has the fields of a model.

    Args:
      fields: the model's fields.
      expressed: the fields of the model that the format would hold instead.
      what: the name of the format.

    Raises:
      CheckpointError: they differ; the message names all fields that do.
    """
    ours, theirs = (dataclasses.asdict(side.canonical()) for side in (fields, expressed))
    lacking = [f"{name}={value!r} (only {theirs[name]!r})" for name, value in ours.items() if value != theirs[name]]
    if lacking:
        raise CheckpointError(f"{what} cannot express {', '.join(lacking)}")
