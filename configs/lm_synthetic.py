"""A small DCFormer, or Transformer of the same shape, on generated tasks like those of the paper's Section 4.3.

    dcvit train --config configs/lm_synthetic.py --workdir W
    dcvit train --config configs/lm_synthetic.py:attention=mha --workdir W2
    dcvit evaluate --workdir W

An example is "apple . wolf . cello . in initial animal w ;": a pattern selects a word, a relation transforms it.
`input_pipeline/text/synthetic.py` lists the tasks. Tokens are words, only the answers count, and nothing is
downloaded. `dcvit evaluate` prints the accuracy of each task. Measured on two CPU cores (time without compilation;
five seeds, 95 % intervals; docs/evidence.csv, `synthetic`):

    attention   steps   time (s)   answers (%)
    dcmha       2,000         22   98.4 ± 0.5
    mha         2,000         12   87.9 ± 2.6
    mha         3,600         22   95.5 ± 3.1
"""

from ml_collections import ConfigDict

from dcvit.models.head_settings import of_attention


def get_config(attention: str = "dcmha", steps: int = 2000, shots: int = 0, persons: bool = False) -> ConfigDict:
    """Return the config.

    `attention` is a name of docs/heads.md, such as "dcmha" or "mha", `steps` the length of training, and `shots` the
    number of examples before the last one of a row. `persons` adds the tasks with persons, which need many more steps.
    """
    tasks = ("*",) if persons else ("first/*", "last/*", "in/*", "unlike/*", "odd/*")
    config = ConfigDict()
    config.seed = 0
    config.total_steps = steps

    config.input = ConfigDict()
    config.input.data = {"kind": "synthetic", "split": "train", "shots": shots, "tasks": tasks}
    config.input.batch_size = 32

    config.model_name = "lm"
    config.model = {
        "width": 64, "depth": 2, "num_heads": 4, "mlp_dim": 128, "position": "learned", "norm": "layernorm",
        "mlp": "gelu", "use_bias": True, "tied": True, "init_std": 0.1, **of_attention(attention),
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
    config.evals = {
        "validation": {
            "type": "in_context", "batch_size": 580, "log_percent": 25,
            "data": {"kind": "synthetic", "split": "validation", "shots": shots, "tasks": tasks, "limit": 2320},
        }
    }  # fmt: skip
    return config
