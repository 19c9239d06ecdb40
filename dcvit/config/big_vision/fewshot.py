"""Stand-in for `big_vision.configs.common_fewshot`, with the data sets of big_vision's few-shot evaluation."""

from __future__ import annotations

from ml_collections import ConfigDict

from dcvit.config.keys import UNITS

# name: data set of tensorflow-datasets, split of the examples to fit, split of the test
DATASETS = {
    "caltech": ("caltech101", "train", "test"),
    "cars": ("cars196:2.1.0", "train", "test"),
    "cifar100": ("cifar100", "train", "test"),
    "dtd": ("dtd", "train", "test"),
    "pets": ("oxford_iiit_pet", "train", "test"),
    "uc_merced": ("uc_merced", "train[:1000]", "train[1000:]"),
}


def get_fewshot_lsr(
    target_resolution: int = 224, resize_resolution: int = 256, runlocal: bool = False, **kw: object
) -> ConfigDict:
    """Return the config of a few-shot evaluation.

    Args:
      target_resolution: side of the crop from the middle of an image.
      resize_resolution: side of the image before.
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
            "num_seeds": 3, "prefix": "", "pp_train": pp, "pp_eval": pp,
            "datasets": {"pets": DATASETS["pets"]} if runlocal else dict(DATASETS),
            "display_first": [("pets" if runlocal else "imagenet", 10)],
            **log, **kw,
        }
    )  # fmt: skip
