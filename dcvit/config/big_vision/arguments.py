"""Stand-in for `big_vision.configs.common`, which config files import as `bvcc`, and for `common_fewshot` beside it.

The functions have the names, arguments and results of big_vision's.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from dcvit.config.keys import UNITS
from dcvit.errors import nearest

# name: data set of tensorflow-datasets, split of the examples to fit, split of the test
DATASETS = {
    "caltech": ("caltech101", "train", "test"),
    "cars": ("cars196:2.1.0", "train", "test"),
    "cifar100": ("cifar100", "train", "test"),
    "dtd": ("dtd", "train", "test"),
    "pets": ("oxford_iiit_pet", "train", "test"),
    "uc_merced": ("uc_merced", "train[:1000]", "train[1000:]"),
}


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
