"""DCViT or ViT on the 1,797 handwritten digits of 8×8 pixels that scikit-learn contains. Nothing is downloaded.

    dcvit train --config configs/vit_digits.py --workdir W
    dcvit train --config configs/vit_digits.py:attention=mha --workdir W2

1,437 images train, 360 test; a patch is 2×2 pixels, so a digit has 16 tokens. On two CPU cores, the 2,694 steps take
73 s (mha: 46 s). DCViT reaches 97.2 % top-1 with seed 0, the model `digits` of the package. After 1,500 steps DCViT and
ViT tie: 95.2 ± 2.6 and 95.2 ± 0.8 % (three seeds, 95 % intervals; docs/evidence.csv, `table8`).
"""

from ml_collections import ConfigDict

from dcvit.models.head_settings import of_attention


def get_config(attention: str = "dcmha", epochs: int = 120) -> ConfigDict:
    """Return the config; `attention` is a name of docs/heads.md, such as "dcmha" or "mha", and changes nothing else."""
    config = ConfigDict()
    config.seed = 0
    config.total_epochs = epochs
    config.num_classes = 10

    config.input = ConfigDict()
    config.input.data = {"kind": "digits", "split": "train"}
    config.input.batch_size = 64
    pp_label = '|onehot(10)|keep("image", "labels")'
    config.input.pp = "pad(1)|random_crop(8)|value_range(-1, 1)" + pp_label
    config.pp_predict = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)"

    config.model_name = "vit"
    config.model = {
        "patch_size": (2, 2), "width": 64, "depth": 2, "mlp_dim": 256, "num_heads": 4,
        "posemb": "learn", "pool_type": "gap", **of_attention(attention),
    }  # fmt: skip

    config.loss = "softmax_xent"
    config.label_smoothing = 0.1
    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.999}
    config.grad_clip_norm = 1.0
    config.lr = 2e-3
    config.wd = 1e-4
    config.schedule = {"decay_type": "cosine", "warmup_percent": 4}

    config.log_percent = 5
    config.ckpt_epochs = 40
    config.evals = {
        "test": {
            "type": "classification", "data": {"kind": "digits", "split": "test"},
            "pp": "value_range(-1, 1)" + pp_label, "batch_size": 120, "log_percent": 10,
        }
    }  # fmt: skip
    return config
