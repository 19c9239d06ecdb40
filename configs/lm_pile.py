"""Language models of the DCMHA paper on the Pile, by name.

    dcvit train --config configs/lm_pile.py:preset=DCFormer++-405M,data_dir=/data/pile --workdir W
    dcvit train --config configs/lm_pile.py:preset=DCPythia-2.8B,data_dir=pile --config.model.branches=q --workdir W
    dcvit train --config configs/lm_pile.py:preset=DCFormer++-405M,data_dir=/data/pile,runlocal=true --workdir W

None of these models has been trained here: hours are not measured, and the results are the paper's, validation
perplexity on the Pile and the average of zero-shot accuracies in % (Tables 4 and 9). Parameters are counted with the
vocabulary given here. Batches are rows of 2048 tokens.

    preset                   parameters    steps  batch  tokens   result
    Transformer-405M        407,334,912   13,500    256      7B   Figure 3
    DCFormer-405M           415,595,520   13,500    256      7B   Figure 3
    Transformer++-405M      411,257,856   13,500    256      7B   11.68
    DCFormer++-405M         419,518,464   13,500    256      7B   10.83
    DCFlash-405M            377,493,504   13,500    256      7B   (2)
    Transformer-834M        837,494,784   28,610    256     15B   Figure 3
    DCFormer-834M           856,077,312   28,610    256     15B   Figure 3
    Transformer++-834M      833,942,016   28,610    256     15B   Figure 3
    DCFormer++-834M         852,524,544   28,610    256     15B   Figure 3
    DCFlash-834M            757,931,520   28,610    256     15B   (2)
    Transformer-1.4B      1,418,649,600   49,591    256     26B   Figure 3
    DCFormer-1.4B         1,451,682,816   49,591    256     26B   Figure 3
    Transformer++-1.4B    1,439,078,400   49,591    256     26B   Figure 3
    DCFormer++-1.4B       1,472,111,616   49,591    256     26B   Figure 3
    DCFlash-1.4B          1,303,913,472   49,591    256     26B   (2)
    Transformer++-2.8B    2,795,036,160  143,000  1,024    300B   (1)
    DCFormer++-2.8B       2,849,562,112  143,000  1,024    300B   6.11 / 56.4
    DCFlash-2.8B          2,506,808,832  143,000  1,024    300B   (2)
    Transformer++-6.9B    6,887,976,960  143,000  1,024    300B   (1)
    DCFormer++-6.9B       6,973,960,192  143,000  1,024    300B   (1)
    DCFlash-6.9B          6,124,744,704  143,000  1,024    300B   (2)
    Transformer++-13B    13,202,816,000  143,000  1,024    300B   (1)
    DCFormer++-13B       13,370,752,000  143,000  1,024    300B   (1)
    DCFlash-13B          11,712,076,800  143,000  1,024    300B   (2)
    Transformer++-33B    32,771,980,800  143,000  1,024    300B   (1)
    DCFormer++-33B       33,197,698,560  143,000  1,024    300B   (1)
    DCFlash-33B          28,992,837,120  143,000  1,024    300B   (2)
    Pythia-2.8B           2,775,208,960  143,000  1,024    300B   6.63 / 53.1
    DCPythia-2.8B         2,829,740,032  143,000  1,024    300B   6.36 / 54.5
    Pythia-6.9B           6,857,302,016  143,000  1,024    300B   6.29 / 55.1
    DCPythia-6.9B         6,943,293,440  143,000  1,024    300B   5.95 / 56.7
    Pythia-12B           11,846,072,320  143,000  1,024    300B   6.01 / 56.5

    (1) Table 6 has the speed of these models; the paper does not train them. Steps and batch are those of the 2.8B
        models, learning rates those of LLaMA (Touvron et al., 2023, Table 2).
    (2) Not a model of the paper: DCFormer++ with four query heads to a key head, composed query-wise among these four.
        Composition then costs about 1 % more operations than none, and any plain attention computes the rest
        (docs/performance.md).

Transformer is GPT-3's architecture with untied embeddings, Transformer++ LLaMA's. DCFormer(++) and DCPythia replace
their attention by DCMHA, with every other layer, the first included, local (256 tokens); the models of Table 3 and
DCPythia also normalize queries and keys. All train with AdamW (0.9, 0.95, eps 1e-8), weight decay 0.1 on matrices,
clipping at 1.0, warm-up for 1 % of the steps and a cosine to 10 % of the peak (Appendix C). The 405M models train for
13,500 steps, as released; 834M and 1.4B for Table 3's tokens over its batch of 0.5M.

Ablations and trade-offs override fields of the preset, as --config.model.FIELD=VALUE:

    Table 9    +static proj.   projection=False and gate=False and static=True
               +dyn. proj.     gate=False          +dyn. gate     projection=False     +all   static=True
               +query-wise     branches=q          +key-wise      branches=k
               +pre comp.      compose=pre         +post comp.    compose=post         R=1, 2, 4   rank=1
    Table 10   3:1, 7:1        window_pattern=3:1  QW             branches=q
    Section 3.2                groups=2

The data is one of three kinds. `kind=megatron` reads Pythia's pre-tokenized files; `data_dir` is the path of the .bin
file, and the last `validation` rows are the validation split. `kind=text` reads .txt, .jsonl, .jsonl.zst and .parquet
files with `tokenizer=…/tokenizer.json`, and `kind=input_ids` reads TFRecords; both expect the folders DATA/train and
DATA/validation. docs/text.md has the details. Tokens of another vocabulary also need --config.vocab_size=N and, for
both kinds of tokenized data, --config.input.data.vocab_size=N and --config.evals.validation.data.vocab_size=N.
--config.document_mask=True masks attention between documents, which the paper does not do. If the data does not define
the token that ends a document, which is 0 in Pythia's files, give it as `end_of_text` of both data sections.

Parameters, optimizer state and batch are split over all chips (mesh axis fsdp). With
--config.mesh="[('fsdp', -1), ('tensor', 4)]" heads and MLPs are also split over four chips. `grad_accum=16` computes
the gradient of a batch in 16 parts. The function `pods` lists the slice of a TPU pod for each model.

Long rows are split over chips too (docs/clusters.md). Here, a batch has as many tokens as above:

    dcvit train --config configs/lm_pile.py:preset=DCFormer++-6.9B,context=32768,grad_accum=4,data_dir=/data/pile \\
      --config.mesh="[('fsdp', -1), ('context', 4)]" --config.sharding_strategy=fsdp \\
      --config.input.batch_size=64 --config.evals.validation.batch_size=64 --workdir W
"""

from ml_collections import ConfigDict

GPT2_VOCAB = 50_257


def get_config(
    preset: str = "DCFormer++-405M",
    data_dir: str = "/data/pile",
    kind: str = "megatron",
    tokenizer: str | None = None,
    context: int = 2048,
    validation: int = 2048,
    grad_accum: int = 1,
    runlocal: bool = False,
) -> ConfigDict:
    """Return the config of the model `preset` for the files at `data_dir`; the module has the other arguments."""
    steps, batch_size, lr = recipe(preset)
    config = ConfigDict()
    config.seed = 0
    config.total_steps = steps

    config.vocab_size = vocabulary(preset)
    options = {"kind": kind, "context": context} | ({"tokenizer": tokenizer} if tokenizer else {})
    if kind != "text":  # the data has tokens
        options |= {"vocab_size": config.vocab_size, "end_of_text": None}
    train, held_out = splits(options, data_dir, validation)
    config.input = {"data": train, "batch_size": batch_size}
    config.grad_accum = grad_accum
    config.mesh = [("fsdp", -1), ("tensor", 1)]
    config.sharding_strategy = "fsdp+tensor"

    config.model_name = "lm"
    config.model = dict(preset=preset, context=context, scan=True, remat="auto", dtype_mm="bfloat16")
    config.loss_chunk = 512

    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
    config.grad_clip_norm = 1.0
    config.lr = lr
    config.wd = 0.1
    config.wd_times_lr = True
    config.wd_mults = (("(.*/)?(kernel|(pos_)?embedding|w_q.|w_k.|w_b)", 1.0), (".*", 0.0))
    config.schedule = {"decay_type": "cosine", "warmup_percent": 1, "end": 0.1}

    config.log_steps = 50
    config.ckpt_steps = 500
    config.evals = {"validation": {"type": "perplexity", "data": held_out, "batch_size": batch_size, "log_steps": 1000}}
    if runlocal:
        _shrink(config)
    return config


def splits(options: dict, data_dir: str, validation: int) -> tuple[dict, dict]:
    """Return the options of the training and of the validation data; of kind megatron, both are rows of one file."""
    if options["kind"] == "text" and "tokenizer" not in options:
        raise ValueError("kind=text needs tokenizer=PATH/tokenizer.json")
    if options["kind"] == "megatron":
        options = options | {"path": data_dir}
        return options | {"rows": (0, -validation)}, options | {"rows": (-validation, None)}
    train, held_out = (options | {"path": f"{data_dir}/{split}"} for split in ("train", "validation"))
    return train, held_out


def pods() -> dict[str, str]:
    """Return the TPU slice to train on, by arguments of `get_config`, with which a chip has one row at a time."""
    slices = {
        "405M": ("v5e:4x4", 16), "834M": ("v5e:4x8", 8), "1.4B": ("v6e:4x8", 8), "2.8B": ("v6e:8x8", 16),
        "6.9B": ("v5p:4x4x8", 8), "12B": ("v5p:4x8x8", 4), "13B": ("v5p:4x8x8", 4), "33B": ("v5p:8x8x8", 2),
    }  # fmt: skip
    families = {
        "Transformer": ("405M", "834M", "1.4B"),
        "Transformer++": ("405M", "834M", "1.4B", "2.8B", "6.9B", "13B", "33B"),
        "Pythia": ("2.8B", "6.9B", "12B"),
    }
    composed = {"Transformer": "DCFormer", "Transformer++": "DCFormer++", "Pythia": "DCPythia"}
    found = {}
    for family, sizes in families.items():
        for size in sizes:
            topology, parts = slices[size]
            for name in (family, composed[family]):
                if (name, size) != ("DCPythia", "12B"):
                    found[f"preset={name}-{size},grad_accum={parts}"] = topology
    return found


def recipe(preset: str) -> tuple[int, int, float]:
    """Return steps, rows in a batch and peak learning rate: Table 3; Pythia (Biderman et al., 2023, Appendix E)."""
    family, _, size = preset.rpartition("-")
    if "Pythia" in family:
        return 143_000, 1024, {"2.8B": 1.6e-4}.get(size, 1.2e-4)
    return {
        "405M": (13_500, 256, 3e-4),
        "834M": (28_610, 256, 2.5e-4),
        "1.4B": (49_591, 256, 2e-4),
        "2.8B": (143_000, 1024, 3.2e-4),
        "33B": (143_000, 1024, 1.5e-4),
    }.get(size, (143_000, 1024, 3e-4))


def vocabulary(preset: str) -> int:
    """Return the vocabulary size: that of GPT-2's tokenizer, or of Pythia's checkpoints, which is padded."""
    family, _, size = preset.rpartition("-")
    return {"2.8B": 50_304, "6.9B": 50_432, "12B": 50_688}.get(size, 50_304) if "Pythia" in family else GPT2_VOCAB


def _shrink(config: ConfigDict) -> None:
    """Reduce the config to a tiny model of the same architecture and a few steps, for a test on a laptop."""
    if config.model.preset.startswith("DCFlash"):
        config.model.update({"num_key_heads": 1, "groups": 1})
    tiny = {"width": 64, "depth": 4, "num_heads": 2, "mlp_dim": 128, "window": 16, "dtype_mm": "float32"}
    config.model.update(tiny)
    config.input.batch_size = 2
    config.grad_accum = 1
    config.mesh, config.sharding_strategy = [("data", -1)], "ddp"
    config.total_steps = 12
    config.loss_chunk = 32
    config.log_steps = 2
    config.ckpt_steps = 6
    config.evals.validation.update({"batch_size": 2, "log_steps": 6})
    config.evals.validation.data.limit = 32
