"""ViT or DCViT on images that a CSV or Parquet file lists, with one label for each image or several.

    dcvit train --config configs/vit_manifest.py:manifest=birds/labels.csv --workdir W
    dcvit train --config "configs/vit_manifest.py:manifest=birds/labels.csv,sep=|" --workdir W2
    dcvit train --config "configs/vit_manifest.py:manifest=birds.csv,labels='finch,owl',val=fold 1 of 5" --workdir W3
    dcvit predict --workdir W2 photo.jpg

The file has a row for each image, a column `path`, relative to the folder of the file, and a column `label` or those of
`labels`. Other options of the source, such as `data_dir`, are keys of --config.input.data and of
--config.evals.val.data. Without `sep`, each image has one label, and the loss is that of a softmax. With `sep`, the
text between the names of several classes in a cell, or with several `labels`, columns of 1 and 0, an image has any
number of labels: the loss is a sum of sigmoid losses, and the evaluation reports average precision and F1. Images
without a known label, an empty cell or -1, do not count. docs/own_images.md describes the files. Images with several
labels are not cropped, because a crop may cut off what a label names. Hours and accuracy depend on the images, and are
not measured.
"""

from ml_collections import ConfigDict


def get_config(
    manifest: str = "",
    labels: str = "label",
    sep: str = "",
    val: str = "val",
    variant: str = "ViT-Ti/16",
    res: int = 224,
    epochs: int = 100,
    batch_size: int = 64,
) -> ConfigDict:
    """Return the config; `val` is the split of validation in the column `split`, or a fold, such as "fold 1 of 5".

    With a split, training uses the rows of the split "train".
    """
    if not manifest:
        raise ValueError("give the file that lists the images: vit_manifest.py:manifest=FILE")
    columns = [column.strip() for column in labels.split(",")]
    several = bool(sep) or len(columns) > 1
    config = ConfigDict()
    config.seed = 0
    config.total_epochs = epochs
    config.num_classes = None  # the number of classes of the manifest

    data = {"kind": "manifest", "manifest": manifest, "labels": columns if len(columns) > 1 else labels}
    data |= {"sep": sep} if sep else {}
    train, held_out = {"split": "train"}, {"split": val}
    if val.startswith("fold "):
        train, held_out = {"part": f"all but {val}"}, {"part": val}
    hot = "" if several else "|onehot({num_classes}, ignore=-1)"
    pp_common = f'|value_range(-1, 1){hot}|keep("image", "labels")'
    pp_eval = f"decode(exif=True)|resize({res})"
    pp_train = f"{pp_eval}|flip_lr"
    if not several:
        pp_eval = f"decode(exif=True)|resize_small({res * 8 // 7})|central_crop({res})"
        pp_train = f"decode(exif=True)|inception_crop({res})|flip_lr|randaug(2, 10)"

    config.input = ConfigDict()
    config.input.data = {**data, **train}
    config.input.batch_size = batch_size
    config.input.pp = pp_train + pp_common
    config.pp_predict = pp_eval + "|value_range(-1, 1)"

    config.model_name = "vit"
    config.model = {"variant": variant, "pool_type": "gap", "posemb": "sincos2d", "dtype_mm": "auto"}

    config.loss = "sigmoid_xent" if several else "softmax_xent"
    config.optax_name = "scale_by_adam"
    config.grad_clip_norm = 1.0
    config.lr = 1e-3
    config.wd = 1e-4
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5}

    config.log_steps = 50
    config.ckpt_epochs = 10
    kind = "multilabel" if several else "classification"
    config.evals = {
        "val": {"type": kind, "data": {**data, **held_out}, "pp": pp_eval + pp_common, "log_epochs": 10},
    }
    return config
