"""The comparison of compositions on generated tasks: which runs its tables have, and what an ablation removes."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_synthetic as bench

from dcvit.config.load import load
from dcvit.dcmha.reference import compose
from dcvit.interpret.attention_maps import attention_maps
from dcvit.models import lm
from dcvit.reproduction import seeded
from dcvit.reproduction.step_times import StepTimes
from dcvit.training.model import make_model


def write_run(workdir, accuracy, drops, total=400):
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"total_steps": 400}))
    rows = [{"step": 0, "num_params": 12345}, {"step": total, bench.METRIC: accuracy}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workdir / "parts.json").write_text(json.dumps({"patterns": {"in": 100 * accuracy}, "drops": drops}))


def test_table_pairs_the_complete_runs_of_each_seed_with_the_plain_model(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "step_times", lambda arms, _: StepTimes(dict.fromkeys(arms, 12.5), "a machine"))
    for seed in range(3):
        for i, arm in enumerate(bench.ARMS):
            interrupted = seed == 2 and arm == "pre only"
            drops = {"all branches": 10.0 + seed} if arm == bench.COMPLETE else {}
            write_run(tmp_path / arm / f"seed{seed}", 0.5 + 0.01 * seed + 0.02 * i, drops, 3 if interrupted else 400)
    result = bench.collect(tmp_path)
    assert result["seeds"] == [0, 1]
    assert [row["arm"] for row in result["rows"]] == [*bench.ARMS]
    for i, row in enumerate(result["rows"]):
        assert row["mean"] == pytest.approx(50.5 + 2 * i)
        assert row["interval"] == pytest.approx(6.353, rel=1e-3)  # t of one degree of freedom times the standard error
        assert row["difference"] == pytest.approx(2 * i)
        assert row["difference_interval"] == pytest.approx(0, abs=1e-9)
    table = bench.lines(result)
    assert table[2] == f"| plain | {bench.STEPS:,} | 12.5 | 12,345 | 50.5 ± 6.4 | – |"
    longer = f"{round(bench.STEPS * bench.LONGER):,}"
    assert table[3] == f"| plain, equal time | {longer} | 12.5 | 12,345 | 52.5 ± 6.4 | +2.0 ± 0.0 |"
    assert "| in | 50.5 ± 6.4 | 54.5 ± 6.4 |" in table
    assert table[-1] == "| all branches | 10.5 ± 6.4 |"


@pytest.mark.parametrize("arm", bench.ARMS)
def test_arms_have_the_composition_that_they_are_named_for(arm, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bench, "run", lambda spec, workdir, *words: calls.append((spec, workdir, words)))
    bench.train_seed(tmp_path, 3)
    ((spec, _, words),) = [call for call in calls if call[1] == tmp_path / arm / "seed3"]
    config = load(spec, words)
    model = make_model(config)
    expected = {
        "plain": (None, "qk"), "plain, equal time": (None, "qk"),
        "complete": ("both", "qk"), "query-wise": ("both", "q"), "key-wise": ("both", "k"),
        "pre only": ("pre", "qk"), "post only": ("post", "qk"),
    }[arm]  # fmt: skip
    assert (model.compose, model.branches) == expected
    assert (config.seed, config.lr) == (3, bench.LR["plain" if arm.startswith("plain") else "complete"])
    assert config.total_steps == round(bench.STEPS * (bench.LONGER if arm == bench.LONG else 1))


def test_tuning_tries_every_learning_rate_on_other_data_than_the_table(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bench, "run", lambda spec, workdir, *words: calls.append(load(spec, words)))
    bench.tune(tmp_path)
    tried = [(make_model(config).compose, config.lr) for config in calls]
    assert sorted(tried, key=str) == sorted(((c, lr) for c in (None, "both") for lr in bench.TRIED), key=str)
    assert {config.seed for config in calls} == {100}
    assert {config.evals.validation.data.seed for config in calls} == {1}
    assert {*bench.LR.values()} <= {*bench.TRIED}


@pytest.fixture(scope="module")
def composed():
    """A model with large dynamic weights, its parameters and tokens."""
    net = lm.Model(11, width=12, depth=2, num_heads=3, mlp_dim=8, context=7, compose="both", init_std=0.5)
    tokens = jax.random.randint(jax.random.key(0), (2, 7), 0, 11)
    rng, params = np.random.default_rng(2), jax.jit(net.init)(jax.random.key(1), tokens)["params"]
    large = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if "w_" in jax.tree_util.keystr(path) else x,
        params,
    )
    return net, large, tokens


@pytest.fixture(scope="module")
def weights_of(composed):
    """A function from parameters to {(layer, where): (before, after)}, the matrices B H T S of each composition."""
    net, _, tokens = composed
    maps_of = jax.jit(lambda params: attention_maps(net, params, tokens))
    return lambda params: {
        (layer, where): pair
        for layer, maps in maps_of(params).items()
        for where, pair in {
            "pre": (maps.scores, maps.composed_scores), "post": (maps.weights, maps.composed_weights)
        }.items()
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_head_whose_branches_are_ablated_borrows_from_no_other(composed, weights_of):
    params = composed[1]
    matrices = weights_of(bench.ablated(params, bench.BRANCHES, [1], [2]))
    whole = weights_of(params)
    for where in ("pre", "post"):
        before, after = matrices[1, where]
        np.testing.assert_allclose(after[:, 2], before[:, 2], atol=1e-5)
        for head in (0, 1):
            assert np.abs(after[:, head] - before[:, head]).max() > 0.1
        np.testing.assert_array_equal(matrices[0, where][1], whole[0, where][1])  # the other layer is as before
    np.testing.assert_allclose(matrices[1, "pre"][1][:, :2], whole[1, "pre"][1][:, :2], atol=1e-5)


@pytest.mark.exhaustive
def test_ablating_all_branches_leaves_plain_attention(composed):
    net, params, tokens = composed
    gone = bench.ablated(params, bench.BRANCHES, [0, 1], [0, 1, 2])
    plain = net.clone(compose=None)
    only = jax.tree_util.tree_map(lambda x: x, gone)
    for layer in range(2):
        attention = only["Transformer"][f"decoderblock_{layer}"]["MultiHeadDotProductAttention_0"]
        for where in ("pre", "post"):
            del attention[where]
    expected, found = (jax.jit(each.apply)({"params": p}, tokens)[0] for each, p in ((plain, only), (net, gone)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_a_branch_is_ablated_alone(composed):
    """The composition without the branch is the one of the same weights with the branch left out."""
    net, params, tokens = composed

    @jax.jit
    def weights(params):
        _, state = net.apply(
            {"params": params}, tokens, mutable=["intermediates"],
            capture_intermediates=lambda module, method: method == "compose_weights",
        )  # fmt: skip
        attention = state["intermediates"]["Transformer"]["decoderblock_0"]["MultiHeadDotProductAttention_0"]
        return attention["compose_weights"][0]

    a = jax.random.normal(jax.random.key(5), (2, 3, 7, 7))
    whole, composed_by = weights(params), jax.jit(compose)
    for branch in bench.BRANCHES:
        where, side = branch.split(", ")
        without, expected = weights(bench.ablated(params, [branch], [0, 1], [0, 1, 2])), {}
        for name in ("pre", "post"):
            gone = {f"{side[0]}{part}": None for part in "12g"} if name == where else {}
            expected[name] = composed_by(a, whole[name]._replace(**gone))
            np.testing.assert_allclose(composed_by(a, without[name]), expected[name], atol=1e-5)
        assert np.abs(composed_by(a, whole[where]) - expected[where]).max() > 0.1


@pytest.mark.weekly
def test_measures_of_a_run_agree_with_its_metrics_and_are_stored(tmp_path, library_promotion):
    tiny = ["model.width=16", "model.depth=1", "model.num_heads=2", "model.mlp_dim=16"]
    tiny += ["evals.validation.data.limit=116", "evals.validation.batch_size=58"]
    bench.run(f"{bench.CONFIG}:steps=2", tmp_path / "run", *tiny)
    found = bench.measure(tmp_path / "run")
    weights = {"first": 13, "last": 13, "in": 13, "unlike": 6, "odd": 13}  # tasks of each pattern
    assert found["patterns"].keys() == weights.keys()
    mean = sum(found["patterns"][name] * count for name, count in weights.items()) / 58
    assert mean == pytest.approx(100 * seeded.final(tmp_path / "run", bench.METRIC))
    assert [*found["drops"]] == [*bench.BRANCHES, "all branches", *(f"layer 0, head {i} by drop" for i in (1, 2))]
    by_head = [*found["drops"].values()][-2:]
    assert by_head == sorted(by_head, reverse=True)
    stored = json.loads((tmp_path / "run" / "parts.json").read_text())
    assert stored == found == bench.measure(tmp_path / "run")
