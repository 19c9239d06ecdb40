"""Figures 5, 7 and 8: captured variance of heads, the example that is selected, and its compositions."""

import functools
import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import HEADS, jit, make_lm, make_tokens

from dcvit import cli, reproduce
from dcvit.hub.model import open_trained
from dcvit.interpret.activations import run_with_cache
from dcvit.interpret.circuits import captured_variance
from dcvit.interpret.circuits import circuits as heads
from dcvit.reproduction import catalog, circuits, in_context

LENGTH = 9


@functools.cache
def random_case():
    """Return the case of a small random model with all terms."""
    net, params = make_lm(position="learned", compose="both", static=True, groups=2)
    arrays = run_with_cache(net, params, make_tokens(1, LENGTH)).arrays
    return circuits.Case(0, [f"w{i}" for i in range(LENGTH)], "right", "wrong", 0, net, arrays)


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr(circuits, "find_case", lambda runs, seeds: random_case())
    return random_case()


def heads_of(rows):
    return np.array([[row[f"head {head}"] for head in range(HEADS)] for row in rows])


@pytest.mark.slow
def test_maps_of_figure_7_compose_the_scores_and_weights_of_the_pair(case, tmp_path):
    """Lenders times the sum of the terms are the composed numbers that the model computes."""
    table = circuits.figure7(tmp_path, [0], 5)
    assert len(table.rows) == 2 * 2 * 7 * HEADS
    for layer in range(2):
        weights = np.asarray(case.arrays[f"block0{layer}/composed_weights"])[0, :, LENGTH - 1]
        head, key = circuits.largest_key(case, layer)
        assert weights[head, key] == weights.max()
        for where, (before, after) in circuits.COMPOSITIONS.items():
            rows = [row for row in table.rows if row["composition"] == f"layer {layer} {where}"]
            parts = {term: heads_of(r for r in rows if r["term"] == term) for term in {row["term"] for row in rows}}
            whole = parts.pop("all")
            np.testing.assert_allclose(sum(parts.values()), whole, atol=1e-6)
            lent, composed = (
                np.asarray(case.arrays[f"block0{layer}/{name}"])[0, :, LENGTH - 1, key] for name in (before, after)
            )
            np.testing.assert_allclose(lent @ whole, composed, rtol=1e-4, atol=1e-5)


def test_figure_8_has_the_arrays_of_the_query_before_and_after_each_composition(case, tmp_path):
    table = circuits.figure8(tmp_path, [0], 5)
    for layer, (where, names) in itertools.product(range(2), circuits.COMPOSITIONS.items()):
        for when, name in zip(("before", "after"), names, strict=True):
            place = f"layer {layer} {where}", when
            found = heads_of(row for row in table.rows if (row["composition"], row["when"]) == place)
            np.testing.assert_allclose(found.T, case.arrays[f"block0{layer}/{name}"][0, :, LENGTH - 1], rtol=1e-5)


@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_the_case_of_trained_models_is_the_first_in_the_order_of_the_data(tmp_path, capsys):
    """The runs of Table 5 are those of Figures 5 to 8."""
    words = ["--steps", "20", "--seeds", "1", "--out", str(tmp_path)]
    for name in ("table5", "figure5", "figure6", "figure7", "figure8"):
        assert cli.run(reproduce.main, [name, *words]) == 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ("in_context/plain/seed0" in capsys.readouterr().out) == (name == "table5")
    runs = tmp_path / "runs" / catalog.ENTRIES["figure7"].compute.folder
    case = circuits.find_case(runs, [0])
    trained = [open_trained(runs / name / "seed0", None, None) for name in ("plain", "DCMHA")]
    greedy = [
        jit(lambda tokens, net=net, params=params: net.apply({"params": params}, tokens)[0].argmax(axis=-1))
        for net, params in (each.language_model() for each in trained)
    ]
    source = trained[0].evaluators()[2]["validation"].source
    for i in range(len(source)):
        row = source[i]
        tokens = row["tokens"]
        plain, composed = (np.asarray(each(jnp.asarray(tokens[None, :-1])))[0] for each in greedy)
        for at in np.flatnonzero(row["is_target"]):
            if composed[at - 1] == tokens[at] != plain[at - 1]:
                decode = trained[0].tokenizer().decode
                assert decode(tokens[:at].tolist()).split() == list(case.words)
                assert decode([int(tokens[at])]).split() == [case.answer]
                assert decode([int(plain[at - 1])]).split() == [case.plain_answer]
                return
    pytest.fail("no answer is the composed model's only")


def test_components_are_the_smallest_number_that_captures_a_share():
    curve = np.array([0.4, 0.5, 0.85, 0.9, 1.0])
    assert [circuits.components(curve, share) for share in (0.3, 0.5, 0.51, 0.9, 1.0)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_figure_5_has_the_mean_curves_of_the_layers(monkeypatch, tmp_path):
    net, params = make_lm(position="learned")
    trained = SimpleNamespace(language_model=lambda: (net, params))
    monkeypatch.setattr(circuits, "open_trained", lambda *_: trained)
    monkeypatch.setattr(in_context, "check_complete", lambda *_: None)
    table = circuits.figure5(tmp_path, [0, 1], 5)

    layers = [[captured_variance(forms) for forms in heads(net, params, layer)] for layer in range(net.depth)]
    expected = dict(zip(("QK", "OV"), np.mean(layers, axis=0), strict=True))
    for kind, curve in expected.items():
        for name in in_context.ARMS:
            rows = [row for row in table.rows if row["heads"] == f"{kind}, {name}"]
            assert [row["components"] for row in rows] == list(range(1, net.width + 1))
            found = [row["captured variance"] for row in rows]
            np.testing.assert_allclose(found, curve, rtol=1e-5)
            assert max(row["± 95 %"] for row in rows) == pytest.approx(0, abs=1e-9)  # all seeds have one model
    assert table.notes[-1].count("undecided") == 2  # and so have both arms
