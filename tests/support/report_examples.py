"""Evaluations for tests of the report: a classifier whose logits are a table, and pages of made-up results."""

import numpy as np
from sources import ListSource, numbered

from dcvit.pages.outcomes import Outcomes
from dcvit.pages.report import Evaluation, render

HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&amp;&lt;", "</title></style>", "\u202egnp.exe",
    "\udcff\udc80", "line\nbreak\ttab", "very long name " * 20, "\U0001f600 caf\u00e9", "javascript:alert(1)",
)  # fmt: skip


def source_of(labels):
    """Return examples whose image is their number, with the given labels."""
    return ListSource(numbered([np.atleast_1d(np.array(label, int)) for label in labels], side=2))


def evaluation(classes, images=400, size=8, names=None, accuracy=0.7, name="test"):
    """A made-up result: random labels, and predictions and confidences that are often right."""
    rng = np.random.default_rng(0)
    outcomes = Outcomes(sigmoid=False)
    for _ in range(4):
        label = rng.integers(classes, size=images // 4)
        hit = rng.random(len(label)) < accuracy
        prediction = np.where(hit, label, rng.integers(classes, size=len(label)))
        confidence = np.where(hit, 0.5 + rng.random(len(label)) / 2, rng.random(len(label))).astype(np.float32)
        wrong = np.where(label != prediction, confidence, -1)
        rows = np.argsort(-wrong)[:24]
        outcomes.add({
            "counted": np.ones(len(label), bool), "several": np.zeros(len(label), bool), "label": label,
            "prediction": prediction, "top1": label == prediction, "confidence": confidence,
            "mistake": wrong[rows] >= 0, "mistake_row": rows,
            "mistake_labels": label[rows][:, None] == np.arange(classes),
            "mistake_image": rng.integers(0, 256, (len(rows), size, size, 3), np.uint8),
        })  # fmt: skip
    names = names or [str(c) for c in range(classes)]
    row = {
        "evaluation": name, "top1": outcomes.correct / outcomes.n, "top5": 0.9 if classes > 5 else None,
        "mean_recall": 0.8, "loss": 0.5, "n": outcomes.n
    }  # fmt: skip
    return Evaluation(
        name=name, row=row, outcomes=outcomes, class_names=names, options={"pp": names[0]},
        describe=lambda i: f"/data/{names[i % classes]}/{i}.png",
    )  # fmt: skip


def page(*evaluations):
    """The page of made-up results."""
    title = f"model {evaluations[0].class_names[0]}"
    return render(title, {"Checkpoint": title}, {"lr": 0.1}, [e.row for e in evaluations], evaluations)
