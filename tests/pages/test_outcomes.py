"""Numbers of the report: equal to numpy and scikit-learn, with padding, ties and several labels."""

import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report_examples import source_of
from sklearn import metrics
from sources import evaluation_data, look_up

from dcvit.evaluators.classification import Evaluator, Options
from dcvit.pages.outcomes import BINS, MISTAKES, Outcomes
from dcvit.parallel.sharding import make_mesh

N, CLASSES = 200, 7
RNG = np.random.default_rng(3)
LABELS = [[int(c)] for c in RNG.integers(CLASSES - 1, size=N)]  # class 6 has no example
LABELS[5], LABELS[6], LABELS[7], LABELS[199] = [], [1, 2], [0, 3, 5], []
TABLE = RNG.normal(size=(N, CLASSES)).astype(np.float32) * 2
TABLE[np.arange(N), [label[0] if label else 0 for label in LABELS]] += 1
TABLE[20:60] = np.round(TABLE[20:60])  # the largest logit occurs several times
TABLE[100:110] = np.eye(CLASSES)[6] * 6  # mistakes of equal confidence
TABLE[:, 4] -= 20  # never predicted


ONE, EIGHT = {"data": 1}, {"data": 8}


def observed(axes=ONE, batch=32, loss="softmax_xent"):
    pp = f"onehot({CLASSES})|value_range(0, 255)|keep('image', 'labels')"
    mesh = make_mesh([*axes.items()], jax.devices()[: math.prod(axes.values())])
    evaluator = Evaluator(
        look_up, evaluation_data(source_of(LABELS), mesh), Options(data={}, pp=pp, batch_size=batch, loss=loss)
    )
    evaluator.observer = outcomes = Outcomes(sigmoid=loss == "sigmoid_xent")
    return evaluator.run({"table": jnp.asarray(TABLE)}), outcomes


class Expected:
    """The same from the whole table in float64."""

    def __init__(self, sigmoid):
        table = TABLE.astype(np.float64)
        each = 1 / (1 + np.exp(-table)) if sigmoid else np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
        self.prediction = table.argmax(axis=1)
        self.confidence = each[np.arange(N), self.prediction]
        self.counted = np.array([len(label) > 0 for label in LABELS])
        self.correct = np.array([p in label for p, label in zip(self.prediction, LABELS, strict=True)])
        single = np.array([len(label) == 1 for label in LABELS])
        self.label = np.array([label[0] for label in LABELS if len(label) == 1])
        self.single_prediction = self.prediction[single]

    def calibration_error(self):
        total = 0.0
        for i in range(BINS):
            inside = self.counted & (i / BINS < self.confidence) & (self.confidence <= (i + 1) / BINS)
            if inside.any():
                gap = abs(self.correct[inside].mean() - self.confidence[inside].mean())
                total += inside.sum() / self.counted.sum() * gap
        return total


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "batch", "loss"), [
    (EIGHT, 24, "sigmoid_xent"), (ONE, 7, "softmax_xent"), ({"data": 2, "fsdp": 2, "tensor": 2}, 256, "softmax_xent"),
])  # fmt: skip
def test_numbers_equal_those_of_independent_libraries(axes, batch, loss):
    """The last batch is padded; rows of padding and rows without labels do not count."""
    printed, got = observed(axes, batch, loss)
    expected = Expected(loss == "sigmoid_xent")
    assert (got.n, got.several) == (expected.counted.sum(), 2) == (N - 2, 2)
    assert got.correct == (expected.correct & expected.counted).sum()
    assert printed["top1"] == got.correct / got.n
    assert got.calibration_error() == pytest.approx(expected.calibration_error(), abs=1e-6)
    matrix = metrics.confusion_matrix(expected.label, expected.single_prediction, labels=range(CLASSES))
    assert got.pairs == {(i, j): matrix[i, j] for i in range(CLASSES) for j in range(CLASSES) if matrix[i, j]}
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        expected.label, expected.single_prediction, labels=range(CLASSES), zero_division=np.nan
    )
    for row in got.classes():
        c = row.number
        assert row.examples == support[c]
        assert row.predictions == (expected.single_prediction == c).sum()
        assert row.f1 == pytest.approx(f1[c])
        for ours, theirs in ((row.recall, recall[c]), (row.precision, precision[c])):
            assert ours == (None if np.isnan(theirs) else pytest.approx(theirs))
    assert (got.classes()[6].recall, got.classes()[4].precision) == (None, None)
    assert printed["mean_recall"] == pytest.approx(np.nanmean(recall))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [7, 256])
def test_the_most_confident_mistakes_are_kept_with_their_images(batch):
    """Of equal confidences, the first examples are kept, for any batch size."""
    _, got = observed(EIGHT, batch)
    expected = Expected(False)
    wrong = [i for i in range(N) if expected.counted[i] and not expected.correct[i]]
    ranked = sorted(wrong, key=lambda i: (-round(expected.confidence[i], 6), i))[:MISTAKES]
    assert [mistake.example for mistake in got.mistakes] == ranked
    assert set(range(100, 110)) < set(ranked)
    for mistake in got.mistakes:
        assert mistake.labels == tuple(LABELS[mistake.example])
        assert mistake.prediction == expected.prediction[mistake.example]
        assert mistake.confidence == pytest.approx(expected.confidence[mistake.example], rel=1e-5)
        assert (mistake.image == mistake.example).all()
        assert mistake.image.base is None  # holds no batch


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 360), (350, 360), (360, 360), (39_876, 50_000)])
def test_the_score_test_of_the_proportion_is_at_its_level_at_both_ends_of_wilsons_interval(successes, n):
    found = Outcomes(sigmoid=False)
    found.correct, found.n = successes, n
    low, high = found.interval()
    assert (low == 0, high == 1) == (successes == 0, successes == n)
    for p in {low, high} - {0, 1}:
        assert n * (successes / n - p) ** 2 == pytest.approx(NormalDist().inv_cdf(0.975) ** 2 * p * (1 - p))


def test_frequent_confusions_are_ordered_by_number_and_then_by_class():
    found = Outcomes(sigmoid=False)
    found.pairs.update({(0, 0): 9, (2, 1): 3, (1, 2): 3, (0, 1): 5})
    assert found.confusions() == [(0, 1, 5, 5 / 14), (1, 2, 3, 1), (2, 1, 3, 1)]
