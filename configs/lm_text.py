"""A small DCFormer++, or Transformer++ of the same shape, on text files of your own.

    python -m dcvit.train --config configs/lm_text.py:data_dir=books --workdir W
    python -m dcvit.train --config configs/lm_text.py:data_dir=books,tokenizer=train,vocab_size=4096 --workdir W
    python -m dcvit.generate --workdir W --prompt "Once upon a time"

`data_dir` is a folder, file or glob of .txt, .jsonl and .jsonl.zst files. Tokens are bytes; `tokenizer=train` trains a
BPE tokenizer on the text and stores it in the workdir, and `tokenizer=PATH/tokenizer.json` uses a given one. The last
tenth of the text, with files in alphabetical order, is the validation split. 1,000 steps take minutes on two CPU cores;
train longer, and larger models (`--config.model.width=512`), on more than a few megabytes of text.
"""

from ml_collections import ConfigDict


def get_config(
    data_dir: str = "",
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    context: int = 256,
    val_fraction: float = 0.1,
    key: str = "text",
    attention: str = "dcmha",
    steps: int = 1000,
    batch_size: int = 16,
) -> ConfigDict:
    """`vocab_size` is that of a tokenizer to train, by default 4096; `key` names the text in a line of .jsonl files."""
    if not data_dir:
        raise ValueError("give the folder or file of the text: lm_text.py:data_dir=FOLDER")
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}; expected a number from 0 to below 1")
    composes = {"dcmha": "both", "mha": None}
    if attention not in composes:
        raise ValueError(f"attention={attention!r}; known: {', '.join(composes)}")
    if tokenizer == "train" or (vocab_size and not tokenizer):
        tokenizer, vocab_size = "{workdir}/tokenizer.json", vocab_size or 4096
    config = ConfigDict()
    config.seed = 0
    config.total_steps = steps
    config.vocab_size = vocab_size  # None: that of the tokenizer

    data = {"kind": "text", "path": data_dir, "context": context, "tokenizer": tokenizer, "key": key}
    config.input = ConfigDict()
    config.input.data = {**data, "part": (0.0, 1 - val_fraction)}
    config.input.batch_size = batch_size

    config.model_name = "lm"
    config.model = {
        "width": 128, "depth": 4, "num_heads": 8, "mlp_dim": 344, "init_std": 0.02, "qk_norm": "rmsnorm",
        "compose": composes[attention],
    }  # fmt: skip

    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.95}
    config.grad_clip_norm = 1.0
    config.lr = 3e-3
    config.wd = 0.1
    config.wd_times_lr = True
    config.wd_mults = (("(.*/)?(kernel|embedding|w_q.|w_k.|w_b)", 1.0), (".*", 0.0))
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5, "end": 0.1}

    config.log_percent = 2
    config.ckpt_percent = 20
    config.evals = {}
    if val_fraction:
        held_out = {**data, "part": (1 - val_fraction, 1.0), "limit": 512}
        config.evals.validation = {"type": "perplexity", "data": held_out, "batch_size": batch_size, "log_percent": 10}
    return config
