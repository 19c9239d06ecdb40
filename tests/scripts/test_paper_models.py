"""Table 4, Table 5 and Figures 5 to 8: questions, answers and heads of trained models of the paper's tables."""

import functools
import importlib.util
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from paper import downstream, in_context, scaling
from small_models import HEADS, SMALL, jit, make_lm, make_tokens

from dcvit import cli
from dcvit.hub.open import open_model
from dcvit.hub.tokenizers import open_tokenizer_of
from dcvit.interpret.activations import compose_weights_of, run_with_cache
from dcvit.lm_eval import OFFLINE
from dcvit.training.evaluation import open_evaluators

LENGTH = 9


# Table 4

TEXT = "import os\n\ndef path_of(name):\n    return path_of + os.path_of(name)\n    # path_of name with ten names\n"


def test_a_word_of_a_cloze_is_in_its_context_which_ends_before_it():
    (found,) = (q for q in downstream.clozes("the name of some name here" + " " * 30, 64) if q["target"] == " name")
    assert found["context"] == "the name of some"
    for text in (TEXT, *downstream.held_out_files()[:3]):
        for question in downstream.clozes(text, 40):
            whole = question["context"] + question["target"]
            assert whole in text
            assert len(whole.encode()) <= 40
            assert question["target"].strip() in question["context"]
            assert question["context"][-1:].strip(), "the harness moves spaces at the end to the target"


def test_the_labeled_choice_follows_its_context_and_the_others_are_different_lines_of_other_texts():
    files = sorted((text for text in downstream.held_out_files() if text.isascii()), key=len)
    text, others = files[-1], sorted({f"\n{line}"[: downstream.LONGEST_LINE] for line in files[-2].split("\n")})
    questions = downstream.choices(text, others, 40)
    assert questions == downstream.choices(text, others, 40)
    squeezed = "\n".join(line.rstrip() for line in text.split("\n"))
    for question in questions:
        wrong = [*question["choices"]]
        right = wrong.pop(question["label"])
        assert question["context"] + right in squeezed
        assert len({*wrong, right}) == downstream.CHOICES
        assert {*wrong} <= {*others}
        assert all(len((question["context"] + choice).encode()) <= 40 for choice in question["choices"])
    counts = [sum(question["label"] == i for question in questions) for i in range(downstream.CHOICES)]
    assert min(counts) > 0.8 * len(questions) / downstream.CHOICES  # no place is right more often


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")
@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_tiny_models_are_trained_once_for_the_table_and_figure_4(paper_main, tmp_path, monkeypatch, capsys):
    """The library without its own tasks, which take long to list; no network."""
    import harness_library  # before lm_eval, whose libraries read its variables  # noqa: F401
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **options: manager(**options, include_defaults=False))
    for name in (*OFFLINE, "DISABLE_MULTIPROC"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(scaling, "SIZES", ((16, 1, 2), (32, 1, 2)))
    monkeypatch.setattr(downstream, "PER_FILE", 1)
    for name in ("figure4", "table4", "table4"):
        assert cli.run(paper_main, [name, "--steps", "4", "--seeds", "1", "--out", str(tmp_path)]) == 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "DCPythia has a lower loss than Pythia" in (tmp_path / "figure4.md").read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["figure4"]


# Tables 5 and 11, Figures 5 to 8


@functools.cache
def random_case():
    """Return the case of a small random model with all terms."""
    net, params = make_lm(position="learned", compose="both", static=True, groups=2)
    arrays = run_with_cache(net, params, make_tokens(1, LENGTH)).arrays
    return in_context.Case([f"w{i}" for i in range(LENGTH)], net, arrays, "")


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr(in_context, "find_case", lambda *_: random_case())
    return random_case()


def heads_of(rows):
    return np.array([[row[f"head {head}"] for head in range(HEADS)] for row in rows])


@pytest.mark.slow
def test_maps_of_figure_7_compose_the_scores_and_weights_of_the_pair(case, tmp_path):
    """The numbers of all heads times the sum of the terms are the composed numbers that the model computes."""
    table = in_context.figure7(tmp_path, [0], 5)
    assert len(table.rows) == 2 * 2 * 7 * HEADS
    for layer in range(2):
        weights = np.asarray(case.arrays[f"block0{layer}/composed_weights"])[0, :, LENGTH - 1]
        key = np.unravel_index(weights.argmax(), weights.shape)[1]
        for where, (before, after) in in_context.COMPOSITIONS.items():
            rows = [row for row in table.rows if row["composition"] == f"layer {layer} {where}"]
            parts = {term: heads_of(r for r in rows if r["term"] == term) for term in {row["term"] for row in rows}}
            whole = parts.pop("all")
            np.testing.assert_allclose(sum(parts.values()), whole, atol=1e-6)
            own, composed = (
                np.asarray(case.arrays[f"block0{layer}/{name}"])[0, :, LENGTH - 1, key] for name in (before, after)
            )
            np.testing.assert_allclose(own @ whole, composed, rtol=1e-4, atol=1e-5)


def test_figure_8_has_distributions_and_their_compositions_over_all_keys(case, tmp_path):
    rows = in_context.figure8(tmp_path, [0], 5).rows
    for layer in range(2):
        for where in ("pre", "post"):
            place = f"layer {layer} {where}"
            before, after = (
                heads_of(row for row in rows if (row["composition"], row["when"]) == (place, when))
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


@pytest.mark.slow
def test_figure_5_has_the_squared_singular_values_of_concatenated_heads(monkeypatch, tmp_path):
    net, params = make_lm(position="learned")
    monkeypatch.setattr(in_context, "open_model", lambda _: SimpleNamespace(module=net, load_params=lambda: params))
    monkeypatch.setattr(in_context, "train", lambda *_: None)
    table = in_context.figure5(tmp_path, [0, 1], 5)
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
            np.testing.assert_allclose([r["captured variance"] for r in rows], np.mean(curves, axis=0), rtol=1e-4)
    assert sum("undecided" in note for note in table.notes) == 2  # both arms have one model


@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_the_case_of_trained_models_is_the_first_in_the_order_of_the_data(paper_main, tmp_path):
    """The runs of Table 5 are those of Figures 5 to 8."""
    for name in ("table5", "figure5", "figure6", "figure7", "figure8"):
        assert cli.run(paper_main, [name, "--steps", "20", "--seeds", "1", "--out", str(tmp_path)]) == 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "runs" / "in_context"
    case = in_context.find_case(folder, [0], 20)
    trained = [open_model(folder / name / "seed0") for name in ("plain", "DCMHA")]
    greedy = [
        jit(lambda tokens, net=net, params=params: net.apply({"params": params}, tokens)[0].argmax(axis=-1))
        for net, params in ((each.module, each.load_params()) for each in trained)
    ]
    source = open_evaluators(trained[0]).evaluators["validation"].source
    decode = open_tokenizer_of(trained[0]).decode
    for row in (source[i] for i in range(len(source))):
        tokens = row["tokens"]
        plain, composed = (np.asarray(each(jnp.asarray(tokens[None, :-1])))[0] for each in greedy)
        for at in np.flatnonzero(row["is_target"]):
            if composed[at - 1] == tokens[at] != plain[at - 1]:
                assert decode(tokens[:at].tolist()).split() == list(case.words)
                assert f"DCMHA answers “{decode([int(tokens[at])]).strip()}”" in case.about
                return
    pytest.fail("no answer is the composed model's only")
