"""Figures 5, 7 and 8: captured variance of heads, the example that is selected, and its compositions."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from small_models import HEADS, SMALL, jit, make_lm, make_tokens

from dcvit import cli, reproduce
from dcvit.hub.model import open_trained
from dcvit.interpret.activations import compose_weights_of, run_with_cache
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
    """The numbers of all heads times the sum of the terms are the composed numbers that the model computes."""
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
            own, composed = (
                np.asarray(case.arrays[f"block0{layer}/{name}"])[0, :, LENGTH - 1, key] for name in (before, after)
            )
            np.testing.assert_allclose(own @ whole, composed, rtol=1e-4, atol=1e-5)


def test_figure_8_has_distributions_and_their_compositions_over_all_keys(case, tmp_path):
    table = circuits.figure8(tmp_path, [0], 5)
    for layer in range(2):
        for where in ("pre", "post"):
            before, after = (
                heads_of(
                    row for row in table.rows if (row["composition"], row["when"]) == (f"layer {layer} {where}", when)
                )
                for when in ("before", "after")
            )
            assert before.shape == after.shape == (LENGTH, HEADS)
            if where == "post":
                np.testing.assert_allclose(before.sum(axis=0), 1, rtol=1e-5)
            found = compose_weights_of(case.arrays, layer, where)._asdict()
            factors = {name: None if x is None else np.asarray(x, np.float64) for name, x in found.items()}
            a = np.zeros((1, HEADS, LENGTH, LENGTH))
            a[0, :, -1] = before.T
            np.testing.assert_allclose(oracle.compose(a, factors, 2)[0, :, -1].T, after, rtol=1e-4, atol=1e-5)


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
    trained = [open_trained(runs / name / "seed0") for name in ("plain", "DCMHA")]
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
def test_figure_5_has_the_squared_singular_values_of_concatenated_heads(monkeypatch, tmp_path):
    net, params = make_lm(position="learned")
    trained = SimpleNamespace(language_model=lambda: (net, params))
    monkeypatch.setattr(circuits, "open_trained", lambda *_: trained)
    monkeypatch.setattr(in_context, "check_complete", lambda *_: None)
    table = circuits.figure5(tmp_path, [0, 1], 5)

    width, expected = SMALL["width"], {"QK": [], "OV": []}
    for layer in range(SMALL["depth"]):
        block = params["Transformer"][f"decoderblock_{layer}"]["MultiHeadDotProductAttention_0"]
        q, k, v, out = (np.asarray(block[name]["kernel"], np.float64) for name in ("query", "key", "value", "out"))
        out = out.reshape(HEADS, -1, width)
        for kind, forms in (
            ("QK", [q[:, h] @ k[:, h].T for h in range(HEADS)]), ("OV", [v[:, h] @ out[h] for h in range(HEADS)]),
        ):  # fmt: skip
            squares = np.linalg.svd(np.concatenate(forms), compute_uv=False) ** 2
            expected[kind].append(np.cumsum(squares) / squares.sum())
    for kind, curves in expected.items():
        for name in in_context.ARMS:
            rows = [row for row in table.rows if row["heads"] == f"{kind}, {name}"]
            assert [row["components"] for row in rows] == list(range(1, width + 1))
            found = [row["captured variance"] for row in rows]
            np.testing.assert_allclose(found, np.mean(curves, axis=0), rtol=1e-4)
            assert max(row["± 95 %"] for row in rows) == pytest.approx(0, abs=1e-9)  # all seeds have one model
    assert table.notes[-1].count("undecided") == 2  # and so have both arms
