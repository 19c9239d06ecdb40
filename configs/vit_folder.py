"""ViT or DCViT on a folder of your own images, trained from scratch.

    dcvit train --config configs/vit_folder.py:data_dir=pets --workdir W
    dcvit train --config configs/vit_folder.py:data_dir=pets,variant=DCViT-Ti/16 --workdir W2
    dcvit predict --workdir W photo.jpg

`data_dir` contains the folders `train` and `val`, each with a folder for every class. With val_fraction=0.1 it contains
the class folders themselves, and a tenth of their images is the validation split. A folder of Parquet files, such as
train.parquet and validation.parquet, is read too; docs/data.md describes them. JPEG, PNG, WebP, AVIF, BMP, GIF and
TIFF files are read and rotated according to their EXIF orientation. A few hundred images are too few to train a ViT
from scratch; if you have a pretrained checkpoint, use transfer.py. The heads of variants with DC compose. The default
is plain, because on images no gain at equal time is shown (docs/heads.md).

Hours and accuracy depend on the images. A model of two layers, width 64, classified 77.5 ± 1.2 % of 641 photographs of
solar cells (five seeds; docs/evidence.csv, `photographs`); the default model is not measured.
"""

from ml_collections import ConfigDict


def get_config(
    data_dir: str = "",
    variant: str = "ViT-Ti/16",
    res: int = 224,
    epochs: int = 300,
    batch_size: int = 64,
    val_fraction: float = 0.0,
    augment: str = "strong",
) -> ConfigDict:
    """Return the config; with `val_fraction=0`, the folders train and val are used.

    `augment="strong"` is for photographs of objects: random crops, RandAugment and mixup. `augment="three"` has
    3-Augment, of DeiT III, in place of RandAugment. `augment="flip"` only mirrors whole images, where a crop or another
    contrast could hide what is looked for, as in inspection.
    """
    if not data_dir:
        raise ValueError("give the folder of the images: vit_folder.py:data_dir=FOLDER")
    if augment not in ("strong", "three", "flip"):
        raise ValueError(f"augment={augment!r}; known: strong, three, flip")
    config = ConfigDict()
    config.seed = 0
    config.total_epochs = epochs
    config.num_classes = None  # the number of class folders

    data = {"kind": "folder", "data_dir": data_dir, "val_fraction": val_fraction or None}
    pp_common = '|value_range(-1, 1)|onehot({num_classes})|keep("image", "labels")'
    pp_eval = f"decode(exif=True)|resize_small({res * 8 // 7})|central_crop({res})"
    colors = "three_augment|color_jitter(0.3, 0.3, 0.3)" if augment == "three" else "randaug(2, 10)"
    pp_train = f"decode(exif=True)|inception_crop({res})|flip_lr|{colors}"
    if augment == "flip":
        pp_eval = f"decode(exif=True)|resize({res})"
        pp_train = pp_eval + "|flip_lr"

    config.input = ConfigDict()
    config.input.data = {**data, "split": "train"}
    config.input.batch_size = batch_size
    config.input.pp = pp_train + pp_common
    config.pp_predict = pp_eval + "|value_range(-1, 1)"

    config.model_name = "vit"
    config.model = {"variant": variant, "pool_type": "gap", "posemb": "sincos2d", "dtype_mm": "auto"}

    config.loss = "softmax_xent"
    config.mixup = 0.0 if augment == "flip" else 0.2
    config.optax_name = "scale_by_adam"
    config.grad_clip_norm = 1.0
    config.lr = 1e-3
    config.wd = 1e-4
    config.schedule = {"decay_type": "cosine", "warmup_percent": 5}

    config.log_steps = 50
    config.ckpt_epochs = 10
    config.evals = {
        "val": {
            "type": "classification", "data": {**data, "split": "val"}, "pp": pp_eval + pp_common, "log_epochs": 10,
        },
    }  # fmt: skip
    return config
