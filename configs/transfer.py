"""Fine-tuning of a trained ViT or DCViT on another data set, optionally at another resolution.

    dcvit train --config configs/transfer.py:init=CHECKPOINT,dataset=oxford_iiit_pet --workdir W
    dcvit train --config configs/transfer.py:init=CHECKPOINT,data_dir=pets --config.input.batch_size=64 --workdir W
    dcvit train --config configs/transfer.py:init=CHECKPOINT,data_dir=pets,attention=dcmha --workdir W

`init` is what `dcvit.load` opens: a workdir, a checkpoint folder of one, a big_vision `.npz` file, or weights of
transformers or timm. The model and the preprocessing are those of `init`, with the number of classes of the new data.
For weights that do not tell their model, give --config.model.variant. `attention=dcmha`, or another name of
docs/heads.md, upcycles a plain model: compositions that start as the identity are added. With `res`, and for weights
that tell no preprocessing, images are cropped to that resolution, by default 384, with the `exif` and the range of
values of `init`; --config.input.pp sets other crops. The head is initialized to zero. Learned position embeddings are
resampled to the new resolution; fixed ones (posemb=sincos2d, as in vit_i1k.py) are computed for it. The recipe is that
of big_vision's transfer.py: momentum, cosine, no weight decay, 500 to 20,000 steps. Its learning rates (--config.lr),
tuned per data set, lie between 0.001 and 0.03. Hours and accuracies on these data sets are not measured here.
"""

from ml_collections import ConfigDict

from dcvit.hub.source import init_config
from dcvit.models.head_settings import with_attention

# name: training, validation and test split, steps
DATASETS = {
    "cifar10": ("train[:98%]", "train[98%:]", "test", 10_000),
    "cifar100": ("train[:98%]", "train[98%:]", "test", 10_000),
    "imagenet2012": ("train[:99%]", "train[99%:]", "validation", 20_000),
    "oxford_iiit_pet": ("train[:90%]", "train[90%:]", "test", 500),
    "oxford_flowers102": ("train[:90%]", "train[90%:]", "test", 500),
}
MODEL = {"variant": "DCViT-S/16", "posemb": "sincos2d", "rep_size": True, "pool_type": "gap"}  # without `init`
RES = 384
LABELS = '|onehot({num_classes})|keep("image", "labels")'


def get_config(
    init: str = "",
    dataset: str = "",
    data_dir: str = "",
    val_fraction: float = 0.0,
    res: int | None = None,
    exif: bool | None = None,
    attention: str | None = None,
) -> ConfigDict:
    """Return the config; arguments that are None are those of `init`.

    `dataset` is a key of DATASETS, or `data_dir` a folder with train and val, or with classes and a `val_fraction`.
    """
    if not init:
        raise ValueError("give the checkpoint to start from: transfer.py:init=CHECKPOINT")
    run = init_config(init)
    if run and run["model_name"] != "vit":
        raise ValueError(f"init={init} is a model of model_name={run['model_name']!r}; expected 'vit'")
    if any(evaluator.get("type") == "multilabel" for evaluator in run.get("evals", {}).values()):
        raise ValueError(f"init={init} has several labels for an image: use vit_manifest.py with config.model_init")
    pp_train, pp_eval = preprocessing(run, res, exif)
    train, evaluated, steps = sources(dataset, data_dir, val_fraction)

    config = ConfigDict()
    config.seed = 0
    config.total_steps = steps
    config.num_classes = None  # the number of classes of the data

    config.input = {"data": train, "batch_size": 512, "pp": pp_train + LABELS}
    config.pp_predict = pp_eval

    config.model_name = "vit"
    model = run.get("model", MODEL)
    config.model = with_attention(model, attention) if attention else model
    config.model_init = init
    config.model_load = {"dont_load": ["head/kernel", "head/bias"], "upcycle": attention not in (None, "mha")}

    config.loss = "softmax_xent"
    config.optax_name = "trace"
    config.optax = {"decay": 0.9, "accumulator_dtype": "bfloat16"}
    config.grad_clip_norm = 1.0
    config.lr = 0.01
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5}

    config.log_steps = 10
    config.ckpt_steps = 1000
    config.evals = {
        name: {"type": "classification", "data": source, "pp": pp_eval + LABELS, "log_steps": 100}
        for name, source in evaluated.items()
    }
    return config


def preprocessing(run: dict, res: int | None, exif: bool | None) -> tuple[str, str]:
    """Return the preprocessing strings of training and of evaluation, without labels: those of `init`, or for `res`."""
    as_run = "pp" in run.get("input", {}) and res is None and exif is None
    res = res or RES
    if as_run:
        pp_eval, pp_train = run["pp_predict"], run["input"]["pp"].partition("|onehot(")[0].partition("|keep(")[0]
        return pp_train if pp_train.startswith("decode") else pp_eval, pp_eval  # the run's images may not be encoded
    ops = [op.strip() for op in run.get("pp_predict", "").split("|")]
    exif = "exif=True" in ops[0] if exif is None else exif
    given = ops[0].removeprefix("decode(").rstrip(")").split(",") if ops[0].startswith("decode(") else []
    kept = [each.strip() for each in given if not each.strip().startswith(("exif", "precise"))]  # channels, dtype
    arguments = ", ".join([each for each in kept if each] + ["exif=True"] * exif)
    decode = f"decode({arguments})" if arguments else "decode"
    value_range = next((op for op in ops if op.startswith(("value_range", "vgg_value_range"))), "value_range(-1, 1)")
    return (
        f"{decode}|inception_crop({res})|flip_lr|{value_range}",
        f"{decode}|resize_small({res * 7 // 6})|central_crop({res})|{value_range}",  # 448 for 384
    )


def sources(dataset: str, data_dir: str, val_fraction: float) -> tuple[dict, dict[str, dict], int]:
    """Return the options of the training data and of each evaluator's data, and the number of training steps."""
    if bool(dataset) == bool(data_dir):
        raise ValueError(f"give either dataset={'|'.join(DATASETS)} or data_dir=FOLDER")
    if dataset and dataset not in DATASETS:
        raise ValueError(f"dataset={dataset!r}; known: {', '.join(DATASETS)}")
    if dataset:
        train, val, test, steps = DATASETS[dataset]
        found = {s: {"kind": "tfds", "name": dataset, "split": s} for s in (train, val, test)}
        return found[train], {"val": found[val], "test": found[test]}, steps
    folder = {"kind": "folder", "data_dir": data_dir, "val_fraction": val_fraction or None}
    return {**folder, "split": "train"}, {"val": {**folder, "split": "val"}}, 500
