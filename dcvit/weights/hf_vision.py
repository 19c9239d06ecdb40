"""Config files of the vision models of Hugging Face transformers: the keys that their families share."""

from __future__ import annotations

from collections.abc import Sequence

from dcvit.errors import CheckpointError
from dcvit.weights import config_table, hf_config, hf_processor, vit_links
from dcvit.weights.config_table import Key, field, written
from dcvit.weights.family import Description
from dcvit.weights.preprocessing import channels_of, size_of, square
from dcvit.weights.tensors import Json, Tensors

# Layers of attention by their names in transformers 4, and in 5.
ATTENTION_4 = (*(f"attention.attention.{name}" for name in ("query", "key", "value")), "attention.output.dense")
ATTENTION_5 = tuple(f"attention.{name}_proj" for name in "qkvo")


def _biases(config: Json, name: str, default: bool) -> str:
    return "qkv" if hf_config.flag(config, name, default) else ""


QKV_BIAS = field("qkv_bias", "qkv_bias", _biases, True, lambda found: found == "qkv")


def sizes(patch_size: int = 16, norm_epsilon: float = 1e-6, width: int = 768, heads: int = 12) -> list[Key]:
    """Return the table of keys that all families share; to write it, fields include `image_size` and `channels`.

    Args:
      patch_size, norm_epsilon, width, heads: defaults of the family in transformers.
    """

    def read_pair(name: str, default: int) -> Key:
        return Key(name, lambda config, _: {name: pair(config, name, default)}, lambda fields: square(fields[name]))

    return [
        field("hidden_size", "width", default=width),
        field("num_hidden_layers", "depth", default=12),
        field("num_attention_heads", "num_heads", default=heads),
        field("layer_norm_eps", "norm_epsilon", hf_config.number, norm_epsilon),
        read_pair("image_size", 224),
        read_pair("patch_size", patch_size),
        written("num_channels", lambda fields: fields["channels"]),
    ]


def described(
    fields: Json, classes: int | None, config: Json, tensors: Tensors, patches: str, processor: str
) -> Description:
    """Return the description of a model.

    Args:
      fields: its fields, and `image_size`.
      classes: number of outputs, or None.
      config: the content of config.json.
      tensors: the tensors of the file.
      patches: the name of the module that embeds patches in the file.
      processor: see `kind` of `dcvit.weights.hf_processor.read`.

    Raises:
      CheckpointError: the embedding of patches has another number of channels; or see `hf_processor.read`.
    """
    channels = hf_config.size(config, "num_channels", 3)
    found = vit_links.shape_of(tensors, f"{patches}.weight", "the file", 4)[1]
    if channels != found:
        raise CheckpointError(f"config.json: num_channels={channels}, but {patches}.weight has {found} channels")
    pp = hf_processor.read(config, processor, fields["image_size"], channels)
    return Description("vit", classes, {name: x for name, x in fields.items() if name != "image_size"}, pp)


def write(keys: Sequence[Key], description: Description) -> Json:
    """Return the entries of config.json for `keys`, from the description's fields, image size and channels."""
    about = {"image_size": size_of(description.pp), "channels": channels_of(description.pp)}
    return config_table.write(keys, {**vit_links.settings(description), **about})


def pair(config: Json, key: str, default: int) -> tuple[int, int]:
    """Return a height and width from a config.json, in which one number may stand for both."""
    value = config.get(key, default)
    if isinstance(value, list) and len(value) == 2:
        return hf_config.size({key: value[0]}, key), hf_config.size({key: value[1]}, key)
    return hf_config.size(config, key, default), hf_config.size(config, key, default)
