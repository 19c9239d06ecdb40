"""Scaling curves: tokens per parameter, fitted lines and compute equivalents; runs are in test_downstream.py."""

import functools
from pathlib import Path

import numpy as np
import pytest

from dcvit.config import load as config
from dcvit.hub.kinds import make_model
from dcvit.models import presets
from dcvit.reproduction import arms, costs, scaling


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["figure3", "figure4"])
def test_models_train_for_tokens_in_proportion_to_their_size_and_families_for_the_same(name):
    found = scaling.points(name, 1200)
    steps = [[point.steps for point in each] for each in found.values()]
    assert all(each == steps[0] for each in steps)
    assert steps[0][-1] == 1200
    for each in found.values():
        per_parameter = [point.steps / point.parameters for point in each]
        assert max(per_parameter) < 1.15 * min(per_parameter)


@functools.cache
def smallest(name):
    """Return the smallest model of each family of a figure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "SIZES", scaling.SIZES[:1])
        return {family: each[0] for family, each in scaling.points(name, 1200).items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", scaling.FAMILIES)
def test_words_of_a_run_make_the_model_of_the_paper_in_small(family):
    """All fields but the shape are those of a preset of the family, windows of an eighth of the context."""
    point = smallest("figure4" if "Pythia" in family else "figure3")[family]
    run = arms.language_model_run(Path(), point.fields, point.steps)
    net = make_model(config.load(run.spec, [*run.words(3), f"model.context={arms.CONTEXT}"]))  # as the data sets it
    assert costs.parameters(net) == point.parameters
    preset = presets.PRESETS[f"{family}-{'2.8B' if 'Pythia' in family else '405M'}"]
    shape = ("depth", "width", "num_heads", "mlp_dim", "init_std", "out_init_std")
    expected = {key: value for key, value in preset.items() if key not in shape}
    assert {key: getattr(net, key) for key in expected} == expected
    assert (net.compose, net.window) == (preset.get("compose"), 8 if "DC" in family else 256)


def some_points(operations):
    return [scaling.Point({}, 1, 1, x) for x in operations]


def test_compute_equivalents_are_the_horizontal_distance_to_the_line_of_the_plain_family():
    plain, composed = some_points([1e10, 1e11, 1e12]), some_points([2e10, 2e11, 2e12])
    losses = np.stack([50 * np.array([1e10, 1e11, 1e12]) ** -0.1, 50 * (1.8 * np.array([2e10, 2e11, 2e12])) ** -0.1])
    np.testing.assert_allclose(scaling.equivalents(plain, composed, losses), 1.8, rtol=1e-9)
    line = scaling.fit([1e10, 1e12], 50 * np.array([1e10, 1e12]) ** -0.1)
    assert (line.b, np.exp(line.log_a)) == pytest.approx((0.1, 50))


@pytest.mark.slow
def test_intervals_contain_the_equivalent_of_each_seed_and_vanish_for_equal_seeds():
    plain, composed = some_points([1e10, 1e11]), some_points([1e10, 1e11])
    losses = np.array([[4.0, 3.0], [3.8, 2.9]])
    same = scaling.bootstrapped(plain, composed, np.stack([losses] * 3))
    np.testing.assert_allclose(same[:, 0], same[:, 1])
    np.testing.assert_allclose(same[:, 0], scaling.equivalents(plain, composed, losses))
    lower = losses - np.array([[0, 0], [0.1, 0.1]])
    low, high = scaling.bootstrapped(plain, composed, np.stack([losses, lower]))[0]
    each = [scaling.equivalents(plain, composed, some)[0] for some in (losses, lower)]
    assert (low, high) == pytest.approx((min(each), max(each)))
