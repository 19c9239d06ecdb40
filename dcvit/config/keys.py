"""Keys of a config: their types, defaults, meanings and ranges."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dcvit.errors import REMOVED, has_type, nearest

OWN_TOKENIZER = "{workdir}/tokenizer.json"  # option `tokenizer` of text: the run trains it and keeps it in its workdir
UNITS = ("steps", "epochs", "examples", "percent")


class Key(NamedTuple):
    """One key of a config: the type of its value, the value if the config does not set it, and its meaning."""

    type: Any
    default: Any
    doc: str


DURATIONS = {
    "total": "Length of training. Required.",
    "log": "Interval between rows of metrics.jsonl; 50 steps if not set. 0: rows of evaluations only.",
    "ckpt": "Interval between checkpoints; only the last step is saved if not set. 0: nothing is saved.",
    "keep_ckpt": "Steps between checkpoints that are also saved, and never removed. 0: none.",
}
KEYS = {
    "seed": Key(int, 0, "Seed of the parameters, the data order and every random choice."),
    "input": Key(dict, {}, "Training data: an object with the keys of the section `input`."),
    "num_classes": Key(
        int | None, 0, "Outputs of an image model. 0: no head. None: as many as the training data has classes."
    ),
    "vocab_size": Key(
        int | None, None, "Vocabulary size of a language model. None: that of the training data's tokenizer."
    ),
    "document_mask": Key(bool, False, "Language models: mask attention between the documents of a row."),
    "model_name": Key(str, "vit", 'File in dcvit/models: "vit" or "lm".'),
    "model": Key(dict, {}, "Arguments of that file's `Model`: a variant or preset, and fields that override it."),
    "model_init": Key(str | None, None, "Model to start from: what `dcvit.load` opens, a .npz or a .bv."),
    "model_load": Key(dict, {}, "Further arguments of the model's `load`: `dont_load`, `upcycle` and `channels`."),
    "distill": Key(
        dict, {},
        "Image models: also learn from a trained model: `teacher` (anything that `dcvit.load` opens), `loss` (`kl` or "
        "`hard`), `temperature`, and `weight` of this loss against that of the labels; docs/finetuning.md.",
    ),
    "loss": Key(str, "softmax_xent", 'Loss of an image model: "softmax_xent" or "sigmoid_xent".'),
    "class_weights": Key(
        str | Sequence[float] | None, None,
        'Image models: a weight of the loss of each class, or "balanced": n/(C·count) of each class, counted in the '
        "training data. None: 1.",
    ),
    "pos_weight": Key(
        str | Sequence[float] | None, None,
        'sigmoid_xent: a weight of the positive labels of each class, or "balanced": negatives ÷ positives of each '
        "class, counted in the training data. None: 1.",
    ),
    "loss_chunk": Key(
        int | None, None, "Language models: positions of a row whose logits exist at a time. None: all."
    ),
    "z_loss": Key(float, 0.0, "Language models: weight of the z-loss, log²Z."),
    "label_smoothing": Key(float, 0.0, "Image models: weight of the uniform distribution in the labels, in [0, 1)."),
    "mixup": Key(float, 0.0, "Image models: α of the Beta(α, α) that mixup draws from. 0: no mixup."),
    "cutmix": Key(float, 0.0, "Image models: α of the Beta(α, α) that cutmix draws from. 0: no cutmix."),
    "mixup_switch_prob": Key(
        float, 0.5, "Image models: probability that a batch gets cutmix instead of mixup, if both are on."
    ),
    "reprob": Key(float, 0.0, "Image models: probability that a random rectangle of a training image is erased."),
    "remode": Key(str, "pixel", 'What replaces that rectangle: "pixel", standard normal noise, or "const", zeros.'),
    "optax_name": Key(
        str, "scale_by_adam",
        'Optimizer: a `scale_by_…` transformation of optax, "trace", "scale_by_adafactor" as in big_vision, or "muon".',
    ),
    "optax": Key(dict, {}, "Arguments of that transformation."),
    "lr": Key(float, 1e-3, "Peak learning rate."),
    "schedule": Key(
        dict, {}, "Arguments of `dcvit.training.optim.schedule`; `warmup` and `cooldown` may be given in any unit."
    ),
    "wd": Key(float, 0.0, "Weight decay. It follows the schedule and is not multiplied by the learning rate."),
    "wd_times_lr": Key(bool, False, "Multiply the weight decay by the learning rate, as AdamW does."),
    "wd_mults": Key(
        Sequence, ((".*/kernel", 1.0),),
        "Pairs (regex of a parameter's whole name, multiplier of wd). The first match counts; no match: 0.",
    ),
    "lr_mults": Key(
        Sequence, (),
        "Pairs (regex of a parameter's whole name, multiplier of lr). The first match counts; no match: 1.",
    ),
    "layer_decay": Key(
        float, 1.0, "Factor of the learning rate and the weight decay from one layer to the one below, as in timm. 1: "
        "none.",
    ),
    "frozen": Key(Sequence, (), "Regexes of the whole names of parameters that are not trained."),
    "freeze_layers": Key(
        int | None, None, "Number of blocks, from the first one, that are not trained; nor are the embeddings. None: "
        "all are trained.",
    ),
    "grad_clip_norm": Key(float | None, None, "Global norm to which gradients are clipped. None: no clipping."),
    "grad_accum": Key(int, 1, "Parts of a batch whose gradients are computed one after the other and averaged."),
    "ema_decay": Key(float, 0.0, "Decay of the exponential moving average of the weights. 0: no average."),
    "ema_warmup": Key(
        bool, False, "Start that average with a lower decay, min(ema_decay, 1 - (1 + updates)^(-2/3)), as timm does."
    ),
    "mesh": Key(
        Sequence, (("data", -1),),
        'Pairs (axis, size) of the device mesh; axes are "data", "fsdp", "context" and "tensor". -1: all others.',
    ),
    "sharding_strategy": Key(
        str | Sequence, "ddp",
        '"ddp", "fsdp", "tensor" or "fsdp+tensor", or pairs (regex, strategy or mesh axes); see '
        "`dcvit.parallel.sharding.shardings`.",
    ),
    "kernels": Key(
        str | None, None, "Kernels of attention on GPUs and TPUs: `verify` uses those that were compared with the "
        "reference on such a device and were the fastest, `trust` uses them unverified, `off` uses none. None: the "
        "environment variable DCVIT_KERNELS, or else `verify`.",
    ),
    "require_fused": Key(
        bool, False, "Refuse to train on a GPU or TPU if attention would not run in a fused kernel."
    ),
    "check_memory": Key(
        bool, True, "Refuse to train if the temporary arrays of the compiled step need more memory than a device has "
        "free.",
    ),
    "evals": Key(
        dict, {},
        "Evaluators by name: `type`, `data`, `pp`, `batch_size`, an interval `log`, `optional` (skip it if its data is "
        "missing), and the evaluator's own arguments.",
    ),
    "pp_predict": Key(str, "", "Preprocessing that `dcvit predict` applies to an image file."),
    "ckpt_keep": Key(int, 2, "Number of latest checkpoints to keep."),
    "ckpt_best": Key(
        Sequence[str], (), '("NAME/METRIC", "max" or "min"): also save and keep the best checkpoint by this metric.'
    ),
    "early_stop": Key(
        Sequence, (),
        '("NAME/METRIC", "min" or "max", N): stop once N evaluations in a row have not improved the metric.',
    ),
    "nonfinite_skip": Key(int, 0, "Number of steps with a non-finite loss or gradient to skip before the run stops."),
    "watchdog_seconds": Key(float, 7200.0, "Print all stacks and exit after this time without progress. 0: never."),
    "tensorboard": Key(bool, True, "Write TensorBoard events if the `data` extra is installed."),
    "wandb": Key(
        dict, {}, "Arguments of `wandb.init`, such as project, name and mode: also write metrics to Weights & Biases."
    ),
    "profile": Key(Sequence[int], (), "(first, last) step of a JAX profiler trace, written to <workdir>/profile."),
}  # fmt: skip
INPUT_KEYS = {
    "data": Key(dict, None, "Arguments of `input_pipeline.open_source`: `kind` and its options."),
    "batch_size": Key(int, None, "Examples in a step, over all devices."),
    "pp": Key(str, "", "Preprocessing string."),
    "pack": Key(
        dict, {},
        "With the op `patches`: images packed into rows; each `images` consecutive images of a batch fill `rows` rows "
        "of `tokens` tokens. {}: each image has a row of its own.",
    ),
    "corrupt": Key(
        str, "fail", 'Damaged examples: "fail" stops the run; "skip" trains on the next readable one instead, and '
        "evaluators leave them out.",
    ),
    "corrupt_max": Key(
        int, 100, "Number of different damaged examples, in training or in an evaluator, after which the run stops all "
        "the same.",
    ),
}  # fmt: skip

# Names of timm, transformers and other libraries → the key of the same meaning.
SYNONYMS = {
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "train_batch_size"), "input.batch_size"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "total_epochs"),
    **dict.fromkeys(("steps", "max_steps", "num_steps"), "total_steps"),
    **dict.fromkeys(("drop_path", "drop_path_rate", "stochastic_depth"), "model.stochastic_depth"),
    **dict.fromkeys(("drop", "drop_rate", "dropout"), "model.dropout"),
    **dict.fromkeys(("optimizer", "opt", "optim"), "optax_name"),
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("warmup", "warmup_steps"), "schedule.warmup_steps"),
    "warmup_epochs": "schedule.warmup_epochs",
    "weight_decay": "wd",
    **dict.fromkeys(("clip_grad", "max_grad_norm", "grad_clip"), "grad_clip_norm"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps"), "grad_accum"),
    **dict.fromkeys(("smoothing", "label_smoothing_factor"), "label_smoothing"),
    **dict.fromkeys(("early_stopping", "patience"), "early_stop"),
    **dict.fromkeys(("pretrained", "init", "model_name_or_path"), "model_init"),
    "model_ema_decay": "ema_decay",
}
# The same for arguments of a config → the argument, of which a config has one or more, and for metrics.
ARGUMENTS = {
    **dict.fromkeys(("data", "data_path", "path"), ("data_dir", "dataset", "manifest")),
    **dict.fromkeys(("compose", "heads"), ("attention", "variant", "preset")),
    **dict.fromkeys(("model", "variant", "preset", "size", "arch"), ("variant", "preset", "size")),
    **dict.fromkeys(("image_size", "img_size", "resolution"), ("res",)),
}
METRICS = {
    **dict.fromkeys(("acc", "acc1", "accuracy", "top_1"), "top1"), "acc5": "top5", "eval_loss": "loss",
    **dict.fromkeys(("map", "mAP", "ap"), "mean_ap"), "f1": "f1_macro", "ppl": "perplexity",
}  # fmt: skip


def is_rate(value: Any) -> bool:
    """Return True for a finite number that is not negative."""
    return has_type(value, float) and 0 <= value <= sys.float_info.max


def are_weights(value: str | Sequence[float] | None) -> bool:
    """Return True for None, "balanced", and finite numbers that are not negative, of which one at least is above 0."""
    return value in (None, "balanced") or (not isinstance(value, str) and all(map(is_rate, value)) and any(value))


# The values that a key accepts beyond its type, and their description in error messages.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("grad_accum", "ckpt_keep", "vocab_size", "loss_chunk"), (lambda v: v is None or v >= 1, "1 or more")
    ),
    **dict.fromkeys(("num_classes", "nonfinite_skip"), (lambda v: v is None or v >= 0, "0 or more")),
    **dict.fromkeys(("ema_decay", "label_smoothing"), (lambda v: 0 <= v < 1, "in [0, 1)")),
    **dict.fromkeys(("mixup_switch_prob", "reprob"), (lambda v: 0 <= v <= 1, "in [0, 1]")),
    **dict.fromkeys(("lr", "wd", "mixup", "cutmix", "z_loss"), (is_rate, "finite and not negative")),
    **dict.fromkeys(("class_weights", "pos_weight"), (are_weights, "'balanced', or finite numbers, 0 or more")),
    "watchdog_seconds": (lambda v: 0 <= v <= 1e9, "from 0 to 1e9"),
    "layer_decay": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "seed": (lambda v: 0 <= v < 2**32, "in [0, 2**32)"),
    "ckpt_best": (lambda v: not v or (len(v) == 2 and v[1] in ("max", "min")), '("NAME/METRIC", "max" or "min")'),
    "early_stop": (
        lambda v: not v or (len(v) == 3 and v[1] in ("max", "min") and type(v[2]) is int and v[2] >= 1),
        '("NAME/METRIC", "min" or "max", evaluations, 1 or more)',
    ),
    "kernels": (lambda v: v in (None, "verify", "trust", "off"), "'verify', 'trust' or 'off'"),
    "remode": (lambda v: v in ("pixel", "const"), "'pixel' or 'const'"),
    "grad_clip_norm": (lambda v: v is None or (is_rate(v) and v > 0), "finite and above 0"),
    "profile": (lambda v: not v or (len(v) == 2 and 0 < v[0] <= v[1]), "(first step, last step)"),
}


def unknown_key(name: str, key: str, known: Iterable[str]) -> str:
    """Return a message about an unknown key: that of the same meaning, the most similar one, or where all are listed.

    Args:
      name: the complete name, such as "config.model".
      key: the part of it that is not known.
      known: the valid names in its place.
    """
    if name in REMOVED:
        return f"unknown key {name!r}; {nearest(name, known)}"
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    if key in SYNONYMS and name in (f"config.{key}", f"config.model.{key}"):
        close = [SYNONYMS[key]]
    hint = f"did you mean {close[0]!r}?" if close else "`dcvit help config` lists all keys"
    return f"unknown key {name!r}; {hint}"
