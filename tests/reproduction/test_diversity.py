"""Figure 5: curves of captured variance are those of a singular value decomposition of the models' weights."""

from types import SimpleNamespace

import numpy as np
import pytest
from small_models import HEADS, SMALL, make_lm

from dcvit.reproduction import diversity, in_context


def test_components_are_the_smallest_number_that_captures_a_share():
    curve = np.array([0.4, 0.5, 0.85, 0.9, 1.0])
    assert [diversity.components(curve, share) for share in (0.3, 0.5, 0.51, 0.9, 1.0)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_figure_5_has_the_squared_singular_values_of_concatenated_heads(monkeypatch, tmp_path):
    net, params = make_lm(position="learned")
    trained = SimpleNamespace(language_model=lambda: (net, params))
    monkeypatch.setattr(diversity, "open_trained", lambda *_: trained)
    monkeypatch.setattr(in_context, "check_complete", lambda *_: None)
    table = diversity.figure5(tmp_path, [0, 1], 5)

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
