"""A small DCViT on digits, trained alone and with a larger model of the package as its teacher.

docs/distillation.md states the criterion, and how temperature, weight and steps were chosen.
"""

from __future__ import annotations

from dcvit.reproduction.images import Experiment

ALONE, DISTILLED = "alone", "distilled"
DISTILL = {"distill.teacher": "digits", "distill.weight": 1.0, "distill.temperature": 2.0, "label_smoothing": 0.0}
DIGITS = Experiment(
    "distillation", "A small DCViT alone and distilled on 300 digits", "vit_digits:attention=dcmha",
    {"input.batch_size": 32, "input.data.limit": 300}, {"DCViT": {"width": 32, "mlp_dim": 128}}, "test/top1", 1347,
    "DCViTs of configs/vit_digits.py with width 32 (two layers, four heads) on the first 300 of the 1,437 training "
    "images of scikit-learn's handwritten digits, in batches of 32, and 360 test images. The teacher is the model "
    "`digits` of the package, of width 64, trained on all 1,437 images for 120 passes, with 97.2 % on the test images. "
    "In place of the labels, smoothed by 0.1, the distilled model learns from the teacher alone, with temperature "
    f"{DISTILL['distill.temperature']:g}.", {ALONE: {}, DISTILLED: {}}, {DISTILLED: DISTILL},
)  # fmt: skip
