"""A small Transformer++, or DCFormer++ of the same shape, on text files of your own.

    dcvit train --config configs/lm_text.py:data_dir=books --workdir W
    dcvit train --config configs/lm_text.py:data_dir=books,attention=dcmha --workdir W2
    dcvit train --config configs/lm_text.py:data_dir=books,tokenizer=train,vocab_size=4096 --workdir W
    dcvit train --config configs/lm_text.py:data_dir=books,init=gpt2,attention=dcmha --workdir W
    dcvit generate --workdir W --prompt "Once upon a time"

`data_dir` is a folder, file or glob of .txt, .jsonl, .jsonl.zst and .parquet files. Tokens are bytes; `tokenizer=train`
trains a BPE tokenizer on the text and stores it in the workdir, and `tokenizer=PATH/tokenizer.json` uses a given one.
The last tenth of the text, with files in alphabetical order, is the validation split. 1,000 steps take minutes on two
CPU cores; what they reach depends on the text, and is not measured. Train longer (`--config.total_steps`), and larger
models (`--config.model.width=512`), on more than a few megabytes of text. The text of .jsonl and .parquet files has the
key "text", or that of `--config.input.data.key` and `--config.evals.validation.data.key`.

`init` is what `dcvit.load` opens: a workdir, a checkpoint folder of one, or weights of transformers. The model and the
tokenizer are those of `init`, and the learning rate is 0.0001. `attention=dcmha` upcycles a plain model: compositions
that start as the identity are added. `attention` is a name of docs/heads.md, by default "mha", because on text no gain
at equal time is shown (docs/heads.md); `folded` needs weights with key heads that several heads share.
"""

from ml_collections import ConfigDict

from dcvit.hub.source import init_config
from dcvit.models.head_settings import with_attention

SMALL = {"width": 128, "depth": 4, "num_heads": 8, "mlp_dim": 344, "init_std": 0.02, "qk_norm": "rmsnorm"}


def get_config(
    data_dir: str = "",
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    context: int | None = None,
    val_fraction: float = 0.1,
    attention: str | None = None,
    init: str = "",
) -> ConfigDict:
    """Return the config; `vocab_size` is that of a tokenizer to train, by default 4096.

    `context` is 256 by default, or that of `init` if it is shorter. `attention` is mha by default, or that of `init`.
    """
    if not data_dir:
        raise ValueError("give the folder or file of the text: lm_text.py:data_dir=FOLDER")
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}; expected a number from 0 to below 1")
    if init and (tokenizer == "train" or vocab_size):
        raise ValueError("a tokenizer to train, or vocab_size, does not go with init: the model has its vocabulary")
    run = start(init, init_config(init), tokenizer) if init else {}
    tokenizer = run.get("tokenizer", tokenizer)
    if tokenizer == "train" or (vocab_size and not tokenizer):
        tokenizer, vocab_size = "{workdir}/tokenizer.json", vocab_size or 4096
    config = ConfigDict()
    config.seed, config.total_steps = 0, 1000
    config.vocab_size = run.get("vocab_size", vocab_size)  # None: that of the tokenizer

    context = context or min(256, run.get("context", 256))
    data = {"kind": "text", "path": data_dir, "context": context, "tokenizer": tokenizer, "key": "text"}
    data |= run.get("end", {})
    config.input = {"data": {**data, "part": (0.0, 1 - val_fraction)}, "batch_size": 16}

    config.model_name = "lm"
    model, name = run.get("model", SMALL), attention or ("" if init else "mha")
    config.model = with_attention(model, name) if name else model
    config.model_init = init or None
    config.model_load = {"upcycle": attention not in (None, "mha")} if init else {}

    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.95}
    config.grad_clip_norm = 1.0
    config.lr = 1e-4 if init else 3e-3
    config.wd = 0.1
    config.wd_times_lr = True
    config.wd_mults = (("(.*/)?(kernel|embedding|w_q.|w_k.|w_b)", 1.0), (".*", 0.0))
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5, "end": 0.1}

    config.log_percent, config.ckpt_percent = 2, 20
    config.evals = {}
    if val_fraction:
        held_out = {**data, "part": (1 - val_fraction, 1.0), "limit": 512}
        config.evals.validation = {"type": "perplexity", "data": held_out, "batch_size": 16, "log_percent": 10}
    return config


def start(init: str, run: dict, tokenizer: str | None) -> dict:
    """Return what the config `run` of `init` sets, its tokenizer if `tokenizer` is None; `end` is the end of text."""
    if run.get("model_name") != "lm":
        raise ValueError(f"init={init} is no language model: {run.get('model_name', 'expected a run or weights')}")
    data = run["input"].get("data", {})
    workdir = init.rstrip("/").rpartition("/checkpoints/")[0] or init.rstrip("/")
    tokenizer = tokenizer or (data.get("tokenizer") or "").replace("{workdir}", workdir) or None
    if not tokenizer and data.get("kind") not in ("text", "stdlib") and run["vocab_size"] != 257:  # those of bytes
        raise ValueError(f"init={init} has no tokenizer.json: give tokenizer=PATH")
    return {
        "model": run["model"], "context": run["model"].get("context", 256), "vocab_size": run["vocab_size"],
        "tokenizer": tokenizer, "end": {"end_of_text": data["end_of_text"]} if "end_of_text" in data else {},
    }  # fmt: skip
