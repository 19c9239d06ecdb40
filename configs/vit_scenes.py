"""DCViT or ViT on scenes of scikit-learn's handwritten digits, in which a marker asks for a relation between them.

    dcvit train --config configs/vit_scenes.py --workdir W
    dcvit train --config configs/vit_scenes.py:attention=mha --workdir W2

The answer is a number from 0 to 9, such as the digit above the marker; `input_pipeline/images/scenes.py` lists the
questions. An image has 27×27 pixels and a token for each of its 3×3 places. The splits have different handwritten
digits. Nothing is downloaded. DCViT does not win here; measured on two CPU cores (time without compilation;
five seeds, 95 % intervals; docs/evidence.csv, `scenes`):

    attention   steps   time (s)   test top-1 (%)
    dcmha       6,000         95   58.6 ± 19.7
    mha         6,000         47   65.4 ± 28.2
    mha        12,000         94   85.1 ± 20.7
"""

from ml_collections import ConfigDict

from dcvit.models.head_settings import of_attention


def get_config(attention: str = "dcmha", steps: int = 6000) -> ConfigDict:
    """`attention` is a name of docs/heads.md, such as "dcmha" or "mha", `steps` the length of training."""
    pp = 'value_range(-1, 1)|onehot(10)|keep("image", "labels")'
    config = ConfigDict()
    config.seed = 0
    config.total_steps = steps
    config.num_classes = 10

    config.input = ConfigDict()
    config.input.data = {"kind": "scenes", "split": "train"}
    config.input.batch_size = 64
    config.input.pp = pp
    config.pp_predict = "decode(1, precise=True)|resize_pillow(27)|value_range(-1, 1)"

    config.model_name = "vit"
    config.model = {
        "patch_size": (9, 9), "width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4,
        "posemb": "learn", "pool_type": "gap", **of_attention(attention),
    }  # fmt: skip

    config.loss = "softmax_xent"
    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.999}
    config.grad_clip_norm = 1.0
    config.lr = 2e-3
    config.wd = 1e-4
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5}

    config.log_percent = 5
    config.evals = {
        split: {
            "type": "classification", "pp": pp, "batch_size": 256, "log_percent": 50,
            "data": {"kind": "scenes", "split": split, "limit": 1024},
        }
        for split in ("validation", "test")
    }  # fmt: skip
    return config
