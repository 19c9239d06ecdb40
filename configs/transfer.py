"""Fine-tuning of a trained ViT or DCViT on another data set, optionally at another resolution.

    python -m dcvit.train --config configs/transfer.py:init=CHECKPOINT,data=oxford_iiit_pet --workdir W
    python -m dcvit.train --config configs/transfer.py:init=CHECKPOINT,data_dir=~/pets,res=224 --workdir W

`init` is a workdir, a checkpoint folder, or a big_vision `.npz` file. The head is initialized to zero. Learned position
embeddings are resampled to the new resolution; fixed ones (posemb=sincos2d, as in vit_i1k.py) are computed for it.
`posemb`, `rep_size` and `pool_type` must be those of the checkpoint. The recipe is that of big_vision's transfer.py:
momentum, cosine, no weight decay, 500 to 20,000 steps. Its learning rates, tuned per data set, lie between 0.001 and
0.03.
"""

from ml_collections import ConfigDict

# name: training, validation and test split, steps
DATASETS = {
    "cifar10": ("train[:98%]", "train[98%:]", "test", 10_000),
    "cifar100": ("train[:98%]", "train[98%:]", "test", 10_000),
    "imagenet2012": ("train[:99%]", "train[99%:]", "validation", 20_000),
    "oxford_iiit_pet": ("train[:90%]", "train[90%:]", "test", 500),
    "oxford_flowers102": ("train[:90%]", "train[90%:]", "test", 500),
}


def get_config(
    init: str = "",
    variant: str = "DCViT-S/16",
    data: str = "",
    data_dir: str = "",
    res: int = 384,
    crop: str = "inception_crop",
    steps: int = 0,
    lr: float = 0.01,
    batch_size: int = 512,
    posemb: str = "sincos2d",
    rep_size: bool = True,
    pool_type: str = "gap",
) -> ConfigDict:
    """`data` is a key of DATASETS, or `data_dir` a folder with train and val. `steps=0` uses the number of DATASETS."""
    if not init:
        raise ValueError("give the checkpoint to start from: transfer.py:init=CHECKPOINT")
    if bool(data) == bool(data_dir):
        raise ValueError(f"give either data={'|'.join(DATASETS)} or data_dir=FOLDER")
    if data and data not in DATASETS:
        raise ValueError(f"data={data!r}; known: {', '.join(DATASETS)}")
    bigger = res * 7 // 6  # 448 for 384
    crops = {
        "inception_crop": f"inception_crop({res})",
        "resmall_crop": f"resize_small({bigger})|random_crop({res})",
        "resize_crop": f"resize({bigger})|random_crop({res})",
    }
    if crop not in crops:
        raise ValueError(f"crop={crop!r}; known: {', '.join(crops)}")
    if data:
        train, val, test, own_steps = DATASETS[data]
        sources = {s: {"kind": "tfds", "name": data, "split": s} for s in (train, val, test)}
        evaluated = {"val": val, "test": test}
    else:
        train, own_steps = "train", 500
        sources = {s: {"kind": "folder", "data_dir": data_dir, "split": s} for s in ("train", "val")}
        evaluated = {"val": "val"}

    config = ConfigDict()
    config.seed = 0
    config.total_steps = steps or own_steps
    config.num_classes = None  # the number of classes of the data

    pp_common = '|value_range(-1, 1)|onehot({num_classes})|keep("image", "labels")'
    pp_eval = f"decode|resize_small({bigger})|central_crop({res})"
    config.input = ConfigDict()
    config.input.data = sources[train]
    config.input.batch_size = batch_size
    config.input.pp = f"decode|{crops[crop]}|flip_lr" + pp_common
    config.pp_predict = pp_eval + "|value_range(-1, 1)"

    config.model_name = "vit"
    config.model = {"variant": variant, "posemb": posemb, "rep_size": rep_size, "pool_type": pool_type}
    config.model_init = init
    config.model_load = {"dont_load": ["head/kernel", "head/bias"]}

    config.loss = "softmax_xent"
    config.optax_name = "trace"
    config.optax = {"decay": 0.9, "accumulator_dtype": "bfloat16"}
    config.grad_clip_norm = 1.0
    config.lr = lr
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5}

    config.log_steps = 10
    config.ckpt_steps = 1000
    config.evals = {
        name: {"type": "classification", "data": sources[split], "pp": pp_eval + pp_common, "log_steps": 100}
        for name, split in evaluated.items()
    }
    return config
