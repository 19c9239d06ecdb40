"""Multi-label evaluator: equal to scikit-learn, for any batch size and device count, without unknown labels."""

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy.special import expit
from sklearn import metrics
from sources import ListSource, evaluation_data, look_up, mesh_of

from dcvit.config import load as configs
from dcvit.config.values import replaced
from dcvit.errors import ConfigError
from dcvit.evaluators.multilabel import Evaluator, Options, best_thresholds, measures
from dcvit.training.evaluation import make_evaluators

N, CLASSES = 61, 5
RNG = np.random.default_rng(0)
LABELS = (RNG.random((N, CLASSES)) < [0.5, 0.3, 0.1, 0.9, 0.0]).astype(np.float32)  # the last class has no image
LOGITS = (RNG.normal(size=(N, CLASSES)) + 1.5 * LABELS - 0.7).astype(np.float32)
LOGITS[10:30] = np.round(LOGITS[10:30])  # equal scores
UNKNOWN = RNG.random((N, CLASSES)) < 0.2
UNKNOWN[7] = True  # an image without a known label
MASKED = np.where(UNKNOWN, np.float32(-1), LABELS)
PARAMS = {"table": jnp.asarray(LOGITS)}
THRESHOLDS = (0.3, 0.5, 0.2, 0.6, 0.5)


def evaluator(labels, devices=1, **options):
    examples = [{"image": np.full((1, 1, 1), i, np.uint8), "labels": row} for i, row in enumerate(labels)]
    pp = "value_range(0, 255)|keep('image', 'labels')"
    data = evaluation_data(ListSource(examples), mesh_of(devices))
    return Evaluator(look_up, data, Options(**{"data": {}, "pp": pp, "batch_size": 16, **options}))


def expected(labels, thresholds):
    """The same measures by scikit-learn, each class over the images whose label is known."""
    known, probabilities = labels >= 0, expit(LOGITS.astype(np.float64))
    predicted = probabilities >= thresholds
    rows = []
    for c in range(CLASSES):
        true, chosen = labels[known[:, c], c], predicted[known[:, c], c]
        precision, recall, f1, _ = metrics.precision_recall_fscore_support(
            true, chosen, average="binary", zero_division=0
        )
        rank = metrics.average_precision_score(true, LOGITS[known[:, c], c]) if true.any() else np.nan
        rows.append((rank, f1, precision, recall, true.sum()))
    nats = -np.where(labels > 0, np.log(probabilities), np.log1p(-probabilities))
    present = [row for row in rows if row[-1]]
    return rows, {
        "mean_ap": np.mean([row[0] for row in present]),
        "f1_macro": np.mean([row[1] for row in present]),
        "f1_micro": metrics.f1_score(labels[known], predicted[known]),
        "loss": CLASSES * nats[known].mean(),
        "n": known.any(axis=1).sum(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "batch", "devices"), [(LABELS, 7, 1), (MASKED, 64, 1), (MASKED, 24, 8)])
def test_measures_equal_those_of_scikit_learn(labels, batch, devices):
    built = evaluator(labels, devices, batch_size=batch, thresholds=THRESHOLDS)
    got = built.run(PARAMS)
    rows, overall = expected(labels, THRESHOLDS)
    assert got == pytest.approx(overall, rel=1e-6)
    assert got.keys() == set(built.metrics)
    for found, (area, f1, precision, recall, positives) in zip(built.classes, rows, strict=True):
        assert (found.f1, found.precision or 0, found.recall or 0) == pytest.approx((f1, precision, recall))
        assert found.positives == positives
        assert found.average_precision == (pytest.approx(area) if positives else None)
    assert sum(found.images for found in built.classes) == (labels >= 0).sum()
    assert built.run(PARAMS) == got


def test_no_other_threshold_has_a_higher_f1():
    chosen = best_thresholds(LOGITS, MASKED)
    assert chosen[4] is None
    for c, threshold in enumerate(chosen[:4]):
        known = MASKED[:, c] >= 0
        scores, true = expit(LOGITS[known, c].astype(np.float64)), MASKED[known, c]
        every = [metrics.f1_score(true, scores >= t) for t in np.unique(scores)]
        assert metrics.f1_score(true, scores >= threshold) == pytest.approx(max(every))
        assert np.abs(scores - threshold).min() > 1e-4  # not on an example
    kept = [0.5 if t is None else t for t in chosen]
    fixed, best = (measures(LOGITS, MASKED, t) for t in ([0.5] * CLASSES, kept))
    assert all(b.f1 >= f.f1 for f, b in zip(fixed, best, strict=True))
    assert sum(b.f1 for b in best) > sum(f.f1 for f in fixed)


def test_logits_of_probability_one_are_predicted_together_or_not_at_all():
    """Above 36.7, all probabilities are 1 in float64."""
    arrays = np.float32([[50, 40, 39, 38, 3, 2.9]]).T, np.float32([[1, 0, 0, 0, 1, 0]]).T
    f1 = {t: measures(*arrays, [t])[0].f1 for t in (*best_thresholds(*arrays), 0, 0.5, 0.95, 1 - 2**-53)}
    assert f1[best_thresholds(*arrays)[0]] == max(f1.values())
    assert measures(*arrays, [1.0])[0].predictions == 0


def test_set_thresholds_change_the_result_without_another_pass():
    built = evaluator(MASKED)
    first = built.run(PARAMS)
    built.data = None
    built.set_thresholds(THRESHOLDS, "")
    assert built.result() == pytest.approx(expected(MASKED, THRESHOLDS)[1], rel=1e-6)
    assert built.result()["mean_ap"] == first["mean_ap"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "softmax_xent"}, r"type='multilabel' is for loss='sigmoid_xent', not 'softmax_xent'"),
        ({"thresholds": [0.5] * 10}, r"evals.test.thresholds has 10 number\(s\), but there are 12 classes"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options, message):
    pp = "value_range(-1, 1)|onehot(12)|keep('image', 'labels')"
    data = {"kind": "digits", "split": "test", "limit": 4}
    evals = {"test": {"type": "multilabel", "data": data, "pp": pp, **options}}
    config = configs.load("vit_digits", ["num_classes=12", "loss=sigmoid_xent"])
    with pytest.raises(ConfigError, match=message):
        make_evaluators(replaced(config, evals=ConfigDict(evals)), look_up, mesh_of(8))
