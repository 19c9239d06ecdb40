"""A small DCFormer++, or Transformer++ of the same shape, on the source code of Python's standard library.

    dcvit train --config configs/lm_stdlib.py --workdir W
    dcvit train --config configs/lm_stdlib.py:attention=mha --workdir W
    dcvit generate --workdir W --prompt "def main"

Tokens are bytes, and nothing is downloaded. About every twentieth file belongs to the validation split. Measured on two
CPU cores by `bash scripts/demo.sh lm --seeds 0,1,2` (time without compilation; mean, smallest–largest):

    attention   steps   time (s)   bits per byte
    dcmha         600         79   2.154 (2.142–2.170)
    mha           600         57   2.287 (2.260–2.300)
    mha           832         82   2.058 (2.029–2.087)

With size=small, heads are as wide as those of larger models, so that composition costs as much as there: 6 heads of 32
instead of 8 of 16, 192 wide instead of 128, and 256 bytes of context instead of 128. A step has 4 rows instead of 16,
because more steps of fewer rows learn more in the same time; 10,600 steps see each byte once.
"""

from ml_collections import ConfigDict

from dcvit.models.head_settings import of_attention

SIZES = {
    "tiny": {"width": 128, "mlp_dim": 344, "num_heads": 8},
    "small": {"width": 192, "mlp_dim": 512, "num_heads": 6},
}
CONTEXTS = {"tiny": 128, "small": 256}
ROWS = {"tiny": 16, "small": 4}


def get_config(attention: str = "dcmha", steps: int = 600, size: str = "tiny") -> ConfigDict:
    """`attention` is a name of docs/heads.md, such as "mha", `steps` the length of training, `size` tiny or small."""
    if size not in SIZES:
        raise ValueError(f"size={size!r}; known: {', '.join(SIZES)}")
    config = ConfigDict()
    config.seed = 0
    config.total_steps = steps

    config.input = ConfigDict()
    config.input.data = {"kind": "stdlib", "split": "train", "context": CONTEXTS[size]}
    config.input.batch_size = ROWS[size]
    config.vocab_size = 257  # bytes, and the token that ends a file

    config.model_name = "lm"
    config.model = {
        "depth": 4, **SIZES[size], "init_std": 0.02, "qk_norm": "rmsnorm", **of_attention(attention),
    }  # fmt: skip

    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.95}
    config.grad_clip_norm = 1.0
    config.lr = 3e-3
    config.wd = 0.1
    config.wd_times_lr = True
    config.wd_mults = (("(.*/)?(kernel|embedding|w_q.|w_k.|w_b)", 1.0), (".*", 0.0))
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5, "end": 0.1}

    config.log_percent = 5
    config.ckpt_percent = 50
    config.evals = {
        "validation": {
            "type": "perplexity", "batch_size": 16, "log_percent": 25,
            "data": {"kind": "stdlib", "split": "validation", "context": CONTEXTS[size], "limit": 512},
        }
    }  # fmt: skip
    return config
