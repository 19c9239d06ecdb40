"""Few-shot evaluator: equal to ridge regression in numpy's float64, for any batch size and device count."""

import jax.numpy as jnp
import numpy as np
import pytest
from sources import ListSource, evaluation_data, mesh_of, numbered

import input_pipeline
from dcvit.errors import ConfigError
from dcvit.evaluators.fewshot import Evaluator, Options, linear_scores

PP = "value_range(0, 255)|keep('image', 'label')"
WIDTH, CLASSES = 12, 4
RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(CLASSES, WIDTH)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, 200)
TABLE = (3 + CENTRES[LABELS] + 2 * RNG.normal(size=(200, WIDTH))).astype(np.float32)  # features by image
TRAIN, TEST = range(83), range(83, 200)


def source_of(rows, **options):
    """Return examples whose image is the number of their row in TABLE."""
    every = numbered(LABELS.tolist())
    return ListSource([every[row] for row in rows], **options)


@pytest.fixture
def sources(monkeypatch):
    """The sources that the evaluator opens, which tests may replace."""
    opened = {"train": source_of(TRAIN), "test": source_of(TEST)}
    monkeypatch.setattr(input_pipeline, "open_source", lambda kind: opened[kind])
    return opened


def evaluate(table=TABLE, devices=1, corrupt="fail", **options):
    def predict(params, images):
        features = params["table"][images[:, 0, 0, 0].astype(jnp.int32)]
        halves = features.reshape(len(images), 2, -1)
        return jnp.zeros((len(images), CLASSES)), {"pre_logits": features, "encoder": {"pre_ln": halves}}

    options = {"data": {"kind": "train"}, "test_data": {"kind": "test"}, "batch_size": 64, "pp": PP, **options}
    data = evaluation_data(input_pipeline.open_source(kind="train"), mesh_of(devices), corrupt)
    evaluator = Evaluator(predict, data, Options(**options))
    return evaluator.run({"table": jnp.asarray(table)})


def ridge(x, labels, x_test, l2_reg, classes=CLASSES):
    """Compute the scores of the regression by its definition, with the constant feature as a column, in float64."""
    x, x_test = x.astype(np.float64), x_test.astype(np.float64)
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    z, z_test = (np.c_[(a - mean) / std, np.full(len(a), 100.0)] for a in (x, x_test))
    y = 2 * np.eye(classes)[labels] - 1
    return z_test @ np.linalg.solve(z.T @ z + l2_reg * np.eye(z.shape[1]), z.T @ y)


def by_hand(shots, seeds, l2_reg, train=TRAIN, classes=CLASSES):
    """Compute the mean accuracy over the seeds, and the numbers of drawn examples."""
    labels, hits, drawn = LABELS[list(train)], [], set()
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        chosen = np.concatenate([rng.permutation(np.where(labels == c)[0])[:shots] for c in range(classes)])
        scores = ridge(TABLE[list(train)][chosen], labels[chosen], TABLE[TEST], l2_reg, classes)
        hits.append(scores.argmax(axis=1) == LABELS[TEST])
        drawn.add(len(chosen))
    return np.mean(hits), drawn


@pytest.mark.slow
def test_accuracy_equals_the_closed_form(sources):
    l2_reg = 3
    got = evaluate(shots=(1, 2, 10, 100), num_seeds=4, l2_reg=l2_reg)
    assert list(got) == ["1shot", "2shot", "10shot", "100shot", "n"]
    assert got["n"] == len(TEST)
    sizes = set()
    for shots in (1, 2, 10, 100):
        expected, drawn = by_hand(shots, 4, l2_reg)
        assert got[f"{shots}shot"] == pytest.approx(expected, abs=1e-12)
        sizes |= drawn
    assert min(sizes) < WIDTH < max(sizes) == len(TRAIN)  # 100 shots include all examples


@pytest.mark.slow
@pytest.mark.parametrize(("number", "offset", "scale"), [(7, 0, 1), (12, 100, 0.1), (13, 0, 1), (400, 100, 0.1)])
def test_scores_equal_the_closed_form(number, offset, scale):
    rng = np.random.default_rng(1)
    x, x_test = ((offset + scale * rng.normal(size=(n, 12))).astype(np.float32) for n in (number, 50))
    x[:, 3] = x_test[:, 3] = 0.1  # a constant feature
    labels = rng.integers(0, 5, number)
    y = np.where(labels[:, None] == np.arange(5), 1, -1)
    got = linear_scores(*(jnp.asarray(a, jnp.float32) for a in (x, y, x_test)), 16.0)
    np.testing.assert_allclose(got, ridge(x, labels, x_test, 16, 5), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_accuracy_is_independent_of_batch_size_and_device_count(sources):
    expected = {f"{shots}shot": by_hand(shots, 2, 2.0**10)[0] for shots in (1, 10)}
    got = evaluate(devices=8, batch_size=7, shots=(1, 10), num_seeds=2)
    assert got == pytest.approx({**expected, "n": len(TEST)}, abs=1e-12)


def test_classes_without_examples_are_allowed_and_never_correct(sources):
    sources["train"].class_names = tuple("abcdef")
    assert evaluate(shots=(5,))["5shot"] == pytest.approx(by_hand(5, 3, 2.0**10, classes=6)[0], abs=1e-12)


def test_unreadable_examples_do_not_count(sources, caplog):
    sources["train"], sources["test"] = source_of(TRAIN, corrupt=(0, 5)), source_of([7, *TEST], corrupt=(0,))
    kept = [row for row in TRAIN if row not in (0, 5)]
    got = evaluate(shots=(10,), corrupt="skip")
    assert got["n"] == len(TEST)
    assert got["10shot"] == pytest.approx(by_hand(10, 3, 2.0**10, train=kept)[0], abs=1e-12)
    assert "skipped example 5: bad bytes" in caplog.messages


def test_nested_representation_is_flattened_and_an_unknown_one_is_an_error(sources):
    assert evaluate(representation="encoder/pre_ln", shots=(5,)) == evaluate(shots=(5,))
    with pytest.raises(ConfigError, match=r"'encoder/preln'; did you mean 'encoder/pre_ln'"):
        evaluate(representation="encoder/preln")


def test_features_that_are_not_finite_have_no_accuracy(sources):
    table = TABLE.copy()
    table[TEST[3], 2] = np.inf
    found = evaluate(table, shots=(1, 5))
    assert (found["n"], np.isnan(found["1shot"]), np.isnan(found["5shot"])) == (len(TEST), True, True)


def test_features_of_padding_are_refused(monkeypatch):
    """Images of different sizes have features of whole images only."""
    examples = [{"image": np.full((2, 2 + i % 3, 3), i, np.uint8), "label": np.int32(i % 2)} for i in range(12)]
    monkeypatch.setattr(input_pipeline, "open_source", lambda: ListSource(examples))

    def predict(params, images):
        tokens = images.in_rows().patches.mean(axis=2)
        return jnp.zeros((len(tokens), 2)), {"pre_logits": tokens[:, 0], "encoded": tokens}

    pp = "patches(1, 16)|value_range(0, 255)|keep('image', 'grid', 'label')"
    options = {"data": {}, "test_data": {}, "shots": (2,), "batch_size": 12, "pp": pp}
    data = evaluation_data(ListSource(examples))
    assert Evaluator(predict, data, Options(**options)).run({})["n"] == 12
    with pytest.raises(ConfigError, match="'encoded' is of each token, with padding of the op patches: choose one of"):
        Evaluator(predict, data, Options(**options, representation="encoded")).run({})
