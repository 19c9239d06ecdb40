"""Training of a ViT on ImageNet-1k, in the style of big_vision: sizes and augmentation are arguments."""

import big_vision.configs.common as bvcc
import ml_collections as mlc
from big_vision.configs.common_fewshot import get_fewshot_lsr

AUGMENTATIONS = {"none": ("", 0.0), "medium": ("randaug(2,10)", 0.2)}


def get_config(arg=None):
    arg = bvcc.parse_arg(arg, variant="S/16", aug="medium", res=224, fewshot=False, runlocal=False)
    augmentation, mixup = AUGMENTATIONS[arg.aug]
    config = mlc.ConfigDict()

    config.seed = 0
    config.total_epochs = 90
    config.num_classes = 1000
    config.loss = "softmax_xent"
    config.log_training_steps = 50
    config.ckpt_steps = 1000
    config.ckpt_timeout = 1

    labels = '|value_range(-1, 1)|onehot(1000, key="{key}", key_result="labels")|keep("image", "labels")'
    evaluation = f"decode|resize_small({arg.res * 8 // 7})|central_crop({arg.res})" + labels
    config.input = {"data": {"name": "imagenet2012", "split": "train[:99%]"}, "batch_size": 1024}
    config.input.pp = f"decode_jpeg_and_inception_crop({arg.res})|flip_lr|{augmentation}" + labels.format(key="label")
    config.input.cache_raw = not arg.runlocal
    config.input.shuffle_buffer_size = 250_000
    config.pp_modules = ["ops_general", "ops_image", "ops_text", "archive.randaug"]
    config.prefetch_to_device = 4

    config.model_name = "vit"
    config.model = dict(variant=arg.variant, rep_size=True, pool_type="gap", posemb="sincos2d")

    config.optax_name = "scale_by_adam"
    config.optax = dict(mu_dtype="bfloat16")
    config.grad_clip_norm = 1.0
    config.lr = 0.001
    config.wd = 0.0001
    config.schedule = dict(warmup_steps=10_000, decay_type="cosine")
    config.mixup = dict(p=mixup, fold_in=None)

    def classification(name, split, key="label"):
        data = dict(name=name, split=split)
        options = dict(type="classification", data=data, loss_name=config.loss, log_steps=2500)
        return dict(**options, pp_fn=evaluation.format(key=key))

    config.evals = {
        "train": classification("imagenet2012", "train[:2%]"),
        "minival": classification("imagenet2012", "train[99%:]"),
        "val": classification("imagenet2012", "validation"),
        "real": classification("imagenet2012_real", "validation", "real_label"),
    }
    if arg.fewshot:
        config.evals.fewshot = get_fewshot_lsr(arg.res, arg.res * 8 // 7, runlocal=arg.runlocal)
    if arg.runlocal:
        config.input.batch_size = 8
        config.input.shuffle_buffer_size = 10
        del config.total_epochs
        config.total_steps = 2
        config.schedule.warmup_steps = 1
        for name in ("train", "minival", "val", "real"):
            evaluator = config.evals[name]
            evaluator.data.split = evaluator.data.split.partition("[")[0] + "[:16]"
    return config
