"""DCViT or ViT from scratch on CIFAR-10 or CIFAR-100 of tensorflow-datasets, on a single GPU or a CPU.

    dcvit train --config configs/vit_cifar.py --workdir W
    dcvit train --config configs/vit_cifar.py:dataset=cifar100,attention=mha --workdir W2
    dcvit train --config configs/vit_cifar.py:runlocal=true --workdir W3    (a few steps of a tiny model)

This config has been tested with generated data only. Its hours and its accuracy are not measured.

The data is prepared once, with a download of about 170 MB:

    python -c "import tensorflow_datasets as tfds; tfds.builder('cifar10').download_and_prepare()"

Size and recipe follow those for small ViTs on small data sets (Lee et al., 2021, arXiv 2112.13492): 9 layers of width
192 with 12 heads and patches of 4×4 pixels, so that an image has 64 tokens; AdamW with learning rate 1e-3 and weight
decay 0.05, batches of 128, a warm-up and a cosine schedule; mixup, cutmix, random erasing, label smoothing 0.1 and
stochastic depth 0.1. RandAugment takes the place of AutoAugment, and training lasts 200 epochs.

Weight decay is not multiplied by the learning rate: 5e-5 here is AdamW's 0.05 at 1e-3.
"""

from ml_collections import ConfigDict

from dcvit.models.head_settings import of_attention

CLASSES = {"cifar10": 10, "cifar100": 100}


def get_config(
    dataset: str = "cifar10", attention: str = "dcmha", epochs: int = 200, runlocal: bool = False
) -> ConfigDict:
    """Return the config; `attention` is a name of docs/heads.md, such as "dcmha" or "mha", and changes nothing else."""
    if dataset not in CLASSES:
        raise ValueError(f"dataset={dataset!r}; known: {', '.join(CLASSES)}")
    config = ConfigDict()
    config.seed = 0
    config.total_epochs = epochs
    config.num_classes = CLASSES[dataset]

    pp_common = f'|value_range(-1, 1)|onehot({CLASSES[dataset]}, key="label", key_result="labels")'
    pp_common += '|keep("image", "labels")'

    config.input = ConfigDict()
    config.input.data = {"kind": "tfds", "name": dataset, "split": "train", "cache": True}
    config.input.batch_size = 128
    config.input.pp = "decode|pad(4)|random_crop(32)|flip_lr|randaug(2, 10)" + pp_common
    config.pp_predict = "decode|resize(32)|value_range(-1, 1)"

    config.model_name = "vit"
    config.model = {
        "patch_size": (4, 4), "width": 192, "depth": 9, "mlp_dim": 384, "num_heads": 12, "posemb": "learn",
        "pool_type": "gap", "stochastic_depth": 0.1, **of_attention(attention), "dtype_mm": "auto",
    }  # fmt: skip

    config.loss = "softmax_xent"
    config.label_smoothing = 0.1
    config.mixup = 0.8
    config.cutmix = 1.0
    config.mixup_switch_prob = 0.5
    config.reprob = 0.25
    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.999}
    config.grad_clip_norm = 1.0
    config.lr = 1e-3
    config.wd = 5e-5
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5}

    config.log_steps = 50
    config.ckpt_epochs = 10
    config.evals = {
        "test": {
            "type": "classification", "data": {"kind": "tfds", "name": dataset, "split": "test", "cache": True},
            "pp": "decode" + pp_common, "batch_size": 500, "log_epochs": 10,
        }
    }  # fmt: skip
    if runlocal:
        _shrink(config)
    return config


def _shrink(config: ConfigDict) -> None:
    """Reduce the config to a tiny model, the first images of each set and a few steps, for a test on a laptop."""
    config.model.update({"width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 4})
    config.input.batch_size = 8
    del config.total_epochs, config.ckpt_epochs
    config.total_steps = 12
    config.log_steps = 2
    config.ckpt_steps = 6
    del config.evals.test.log_epochs
    config.evals.test.update({"log_steps": 6, "batch_size": 8})
    config.evals.test.data.limit = 64
