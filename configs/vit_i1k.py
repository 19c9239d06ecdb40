"""ViT-S/16, DCViT-S/16 or ViT-M/16 on ImageNet-1k with the recipe of the DCMHA paper (Section 4.5).

    dcvit train --config configs/vit_i1k.py:variant=DCViT-S/16 --workdir W
    dcvit train --config configs/vit_i1k.py:variant=DCViT-S/16,runlocal=true --workdir W    (on a laptop)
    dcvit train --config configs/vit_i1k.py:variant=DCViT-S/16,data_dir=~/imagenet-1k --workdir W    (Parquet files)
    dcvit evaluate --config configs/vit_i1k.py:variant=DCViT-S/16 --checkpoint CHECKPOINT

Accuracies are not measured here. 90 epochs of DCViT-S/16 are estimated to take 0.5 hours on a TPU v5e-32 and 1.1 on a
v6e-8, without input and evaluations, from the TPU compiler's seconds for a step (docs/evidence.csv, `recipe`).

The table lists the paper's results (Table 8; top-1 / top-5 accuracy in %). big_vision reaches 76.5 % with a schedule of
90 epochs, so the column for epoch 90 is probably a checkpoint of the run with 300 epochs (epochs=300):

    model         epoch 90      epoch 300     relative training FLOPs
    ViT-S/16      65.2 / 86.8   79.8 / 94.7   1
    DCViT-S/16    68.0 / 88.6   80.1 / 95.0   1.03
    ViT-M/16      67.1 / 87.9   80.3 / 94.9   1.72

The released training configuration and the paper's text differ:

                        default: big_vision and the released configuration       as_written=true (Appendix C)
    Adam's β2           0.999                                                    0.9
    cosine decay to     0                                                        10 % of the peak
    warm-up, clipping, peak learning rate, weight decay: the same in both (10,000 steps, 1.0, 1e-3, 1e-4)
    weight decay is not multiplied by the learning rate: 1e-4 here is AdamW's 0.1 at 1e-3

    as_released=true    the released DCViT also has a LayerNorm over q and k and the static projection W_b, which are
                        not in the text and its parameter count: 22,705,480 parameters instead of 22,703,080

On TPUs and GPUs, activations are bfloat16 (dtype_mm="auto"); parameters, norms, softmax and logits are always float32.
The paper and big_vision's config train with float32 activations: --config.model.dtype_mm=float32.

The data is imagenet2012 of tensorflow-datasets or, with data_dir=FOLDER, ImageNet-1k as the Hugging Face Hub stores it:
train-00000-of-00294.parquet and so on, in FOLDER or FOLDER/data. Evaluation also uses imagenet2012_real, imagenet_v2,
imagenet_a, imagenet_r and imagenet_sketch of tensorflow-datasets if they exist; docs/imagenet.md explains how
to prepare them. With --config.input.data.cache=true raw examples are kept in memory (about 140 GB).
"""

from ml_collections import ConfigDict

PARTS = {"train[:99%]": (0.0, 0.99), "train[99%:]": (0.99, 1.0), "train[:2%]": (0.0, 0.02), "validation": (0.0, 1.0)}


def get_config(
    variant: str = "DCViT-S/16",
    epochs: int = 90,
    as_released: bool = False,
    as_written: bool = False,
    runlocal: bool = False,
    data_dir: str = "",
) -> ConfigDict:
    """Return the config; `variant` names the model. The module describes `as_released`, `as_written` and `data_dir`."""
    config = ConfigDict()
    config.seed = 0
    config.total_epochs = epochs
    config.num_classes = 1000

    size, resized = (32, 40) if runlocal else (224, 256)
    pp_common = '|value_range(-1, 1)|onehot(1000, key="{label}", key_result="labels")|keep("image", "labels")'
    pp_eval = f"decode|resize_small({resized})|central_crop({size})"

    config.input = ConfigDict()
    config.input.data = _source("imagenet2012", "train[:99%]", data_dir)
    config.input.batch_size = 1024
    config.input.pp = f"decode_jpeg_and_inception_crop({size})|flip_lr|randaug(2, 10)" + pp_common.format(label="label")
    config.pp_predict = pp_eval + "|value_range(-1, 1)"

    config.model_name = "vit"
    config.model = {"variant": variant, "rep_size": True, "pool_type": "gap", "posemb": "sincos2d", "dtype_mm": "auto"}
    if as_released and variant.startswith("DCViT"):
        config.model.update({"qk_norm": "layernorm", "static": True})

    config.loss = "softmax_xent"
    config.mixup = 0.2
    config.optax_name = "scale_by_adam"
    config.optax = {"b1": 0.9, "b2": 0.9 if as_written else 0.999, "mu_dtype": "bfloat16"}
    config.grad_clip_norm = 1.0
    config.lr = 1e-3
    config.wd = 1e-4
    config.schedule = {"decay_type": "cosine", "warmup_steps": 10_000, "end": 0.1 if as_written else 0.0}

    config.log_steps = 50
    config.ckpt_steps = 1000

    def evaluation(name: str, split: str, label: str = "label", **options: object) -> dict:
        source, pp = _source(name, split, data_dir), pp_eval + pp_common.format(label=label)
        return {"type": "classification", "data": source, "pp": pp, "log_steps": 2500, **options}

    config.evals = {
        "train": evaluation("imagenet2012", "train[:2%]"),
        "minival": evaluation("imagenet2012", "train[99%:]"),
        "val": evaluation("imagenet2012", "validation"),
        "real": evaluation("imagenet2012_real", "validation", "real_label", optional=True),
        "v2": evaluation("imagenet_v2/matched-frequency", "test", optional=True),
        "a": evaluation("imagenet_a", "test", optional=True, present_classes_only=True),
        "r": evaluation("imagenet_r", "test", optional=True, present_classes_only=True),
        "sketch": evaluation("imagenet_sketch", "test", optional=True),
    }
    if runlocal:
        _shrink(config, composed=variant.startswith("DCViT"))
    return config


def _source(name: str, split: str, folder: str) -> dict:
    """Return the options of a split's data: of tensorflow-datasets, or imagenet2012 from Parquet files in a folder."""
    if not folder or name != "imagenet2012":
        return {"kind": "tfds", "name": name, "split": split}
    return {"kind": "parquet", "data_dir": folder, "split": split.partition("[")[0], "part": PARTS[split]}


def pods() -> dict[str, str]:
    """Return the TPU slice for training, by arguments of `get_config`."""
    return {f"variant={variant}": "v5e:4x8" for variant in ("ViT-S/16", "DCViT-S/16", "ViT-M/16")}


def _shrink(config: ConfigDict, *, composed: bool) -> None:
    """Reduce the config to a tiny model, the first images of each set and a few steps, for a test on a laptop."""
    config.model.variant = ("DCViT-" if composed else "ViT-") + "mu/16"
    config.model.num_heads = 4
    config.input.batch_size = 8
    del config.total_epochs
    config.total_steps = 12
    config.schedule.warmup_steps = 2
    config.log_steps = 2
    config.ckpt_steps = 6
    for name in config.evals:
        config.evals[name].update({"log_steps": 6, "batch_size": 8})
        config.evals[name].data.limit = 64
