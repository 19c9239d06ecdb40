"""Comparisons of runs with several seeds: which runs their tables have, and what an ablation removes."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs as bench
import synthetic_parts as parts
from fake_training import write_run

from dcvit import train
from dcvit.config.load import load
from dcvit.dcmha.reference import compose
from dcvit.errors import ConfigError, MetricsError
from dcvit.interpret.attention_maps import attention_maps
from dcvit.models import lm
from dcvit.reproduction import seeded
from dcvit.reproduction.seeded import Run, run_checksum, stored
from dcvit.reproduction.speeds import StepTimes
from dcvit.training.model import make_model


def write(run, seed, value, complete=True, **config):
    """Write the files of a run of nine steps, or of three of them."""
    workdir = run.folder / f"seed{seed}"
    write_run(workdir, {"total_steps": 9, "seed": seed, **config}, {run.metric: value})
    if not complete:
        (workdir / "metrics.jsonl").write_text(json.dumps({"step": 3, run.metric: value}) + "\n")
    return workdir


@pytest.mark.parametrize(
    ("name", "control", "long", "longer"),
    [("synthetic", "plain", "plain, equal time", 1.8), ("scenes", "ViT", "ViT, equal time", 2.0)],
)
def test_tables_pair_the_complete_runs_of_each_seed_with_the_control(
    name, control, long, longer, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench, "step_times", lambda arms, _: StepTimes(dict.fromkeys(arms, 12.5), "a machine"))
    runs = bench.BENCHMARKS[name].runs(tmp_path, 0)
    for seed in range(3):
        for i, (arm, run) in enumerate(runs.items()):
            value = 0.5 + 0.01 * seed + 0.02 * i
            workdir = write(run, seed, value, complete=seed < 2 or i < 2)
            drops = {"all branches": 10.0 + seed} if arm == bench.COMPLETE else {}
            measured = {"patterns": {"in": 100 * value}, "drops": drops}
            stored(workdir / "parts.json", run_checksum(workdir), lambda measured=measured: measured)
    result = bench.collect(name, tmp_path)
    assert result["seeds"] == [0, 1]
    assert [row["arm"] for row in result["rows"]] == [*runs]
    for i, row in enumerate(result["rows"]):
        assert row["mean"] == pytest.approx(50.5 + 2 * i)
        assert row["interval"] == pytest.approx(6.353, rel=1e-3)  # t of one degree of freedom times the standard error
        assert row["difference"] == pytest.approx(2 * i)
        assert row["difference_interval"] == pytest.approx(0, abs=1e-9)
    steps = {arm: load(run.spec).total_steps for arm, run in runs.items()}
    assert steps == {arm: round(steps[control] * (longer if arm == long else 1)) for arm in runs}
    table, number = bench.lines(name, result), [*runs].index(long)
    assert table[2] == f"| {control} | {steps[control]:,} | 12.5 | 7 | 50.5 ± 6.4 | – |"
    expected = f"{50.5 + 2 * number:.1f} ± 6.4 | +{2 * number:.1f} ± 0.0 |"
    assert table[2 + number] == f"| {long} | {steps[long]:,} | 12.5 | 7 | {expected}"
    if name == "synthetic":
        assert "| in | 50.5 ± 6.4 | 54.5 ± 6.4 |" in table
        assert table[-1] == "| all branches | 10.5 ± 6.4 |"


def test_the_table_of_upcycling_pairs_seeds_and_has_the_change_before_the_first_step(tmp_path):
    values = {"plain": (3.0, 5.0), "composed": (2.0, 4.0), "plain, then composed": (2.5, 4.5)}
    values["plain, then plain"] = (3.25, 5.25)
    runs = bench.upcycle(tmp_path, 0)
    assert runs.keys() == {*values, "first"}
    for seed in range(2):
        write(runs["first"], seed, 4.0)
        for arm, ends in values.items():
            path = write(runs[arm], seed, ends[seed]) / "metrics.jsonl"
            start = {"step": 0, "num_params": 12345, runs[arm].metric: 4.0 + 0.001 * seed}
            path.write_text(json.dumps(start) + "\n" + path.read_text().splitlines()[-1] + "\n")
    write(runs["plain, then plain"], 2, 99.0, complete=False)
    result = bench.collect("upcycle", tmp_path)
    assert result["seeds"] == [0, 1]
    assert result["step_0"] == pytest.approx(0.001)
    composed = result["rows"][1]
    assert composed["mean"] == 3.0
    assert composed["interval"] == pytest.approx(12.7062, rel=1e-4)  # t of one degree of freedom
    assert (composed["difference"], composed["difference_interval"]) == (-1.25, 0)
    lines = bench.lines("upcycle", result)
    assert lines[2] == "| plain | 600 | 12,345 | 4.000 ± 12.706 | −0.250 ± 0.000 |"
    assert lines[-1] == "| plain, then plain | 400 + 200 | 12,345 | 4.250 ± 12.706 | – |"


def configs_of(runs, seed):
    return {arm: load(run.spec, run.words(seed)) for arm, run in runs.items()}


def test_arms_of_generated_tasks_have_the_composition_that_they_are_named_for(tmp_path):
    models = {arm: make_model(config) for arm, config in configs_of(bench.synthetic(tmp_path, 3), 3).items()}
    assert {arm: (model.compose, model.branches) for arm, model in models.items()} == {
        "plain": (None, "qk"), "plain, equal time": (None, "qk"),
        "complete": ("both", "qk"), "query-wise": ("both", "q"), "key-wise": ("both", "k"),
        "pre only": ("pre", "qk"), "post only": ("post", "qk"),
    }  # fmt: skip


@pytest.mark.parametrize("name", bench.TRIED)
def test_arms_differ_in_composition_and_steps_only(name, tmp_path):
    found = configs_of(bench.BENCHMARKS[name].runs(tmp_path, 3), 3)
    for config in found.values():
        assert config.seed == 3
        assert config.lr in bench.TRIED[name]
        config.unlock()
        with config.ignore_type():
            config.model.compose = config.model.branches = config.total_steps = None
    assert len({config.to_json() for config in found.values()}) == 1


@pytest.mark.parametrize("name", bench.TRIED)
def test_tuning_tries_every_learning_rate_on_other_data_than_the_table(name, tmp_path):
    runs = bench.tuning_runs(name, tmp_path)
    configs = [load(run.spec, run.words(100)) for run in runs]
    tried = [(make_model(config).compose, config.lr) for config in configs]
    assert sorted(tried, key=str) == sorted(((c, lr) for c in (None, "both") for lr in bench.TRIED[name]), key=str)
    assert {config.seed for config in configs} == {100}
    assert {run.metric.partition("/")[0] for run in runs} == {"validation"}
    if name == "synthetic":  # which has no test split
        assert {config.evals.validation.data.seed for config in configs} == {1}


def arm_runs(tmp_path, arms="a"):
    return {arm: Run(tmp_path / arm, "vit_scenes:steps=9", {}, "validation/top1") for arm in arms}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda seed: {"lr": 0.1 * (1 + seed)}, r"seed1 holds a run of another config: config\.lr \(saved: 0\.2, now"),
        (lambda seed: {"evals": {"validation": {"limit": 10 + seed}}}, r"config\.evals\.validation\.limit"),
    ],
)
def test_seeds_of_another_config_are_not_mixed_into_a_table(config, message, tmp_path):
    runs = arm_runs(tmp_path)
    for seed in range(2):
        write(runs["a"], seed, 0.5, **config(seed))
    with pytest.raises(ConfigError, match=message):
        bench.complete_seeds(runs)


def test_only_folders_of_seeds_with_all_arms_complete_count(tmp_path):
    runs = arm_runs(tmp_path, "ab")
    for seed in range(3):
        write(runs["a"], seed, 0.5 + seed, tensorboard=bool(seed))  # may differ
        write(runs["b"], seed, 0.5, complete=seed < 2)
    (tmp_path / "a" / "seed1.old").mkdir()
    assert bench.complete_seeds(runs) == {0: {"a": 0.5, "b": 0.5}, 1: {"a": 1.5, "b": 0.5}}


def test_a_run_that_diverged_is_an_error_and_not_left_out(tmp_path):
    runs = arm_runs(tmp_path)
    write(runs["a"], 0, None)
    with pytest.raises(MetricsError, match="seed0: validation/top1 is not a number after the last step"):
        bench.complete_seeds(runs)


def test_a_complete_run_is_skipped_only_if_its_config_is_that_of_the_command(tmp_path):
    run = arm_runs(tmp_path)["a"]
    write_run(run.folder / "seed0", json.loads(load(run.spec, run.words(0)).to_json()), {run.metric: 0.5})

    def fail(words):
        pytest.fail("trained")

    assert seeded.train_run(run, 0, fail) == 0
    with pytest.raises(ConfigError, match=r"seed0 holds a run of another config: config\.lr .*Remove it"):
        seeded.train_run(run._replace(overrides={"lr": 0.5}), 0, fail)


def run_main(tmp_path, monkeypatch, value):
    arguments = ["bench", "scenes", "--out", str(tmp_path), "--seeds", "2", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(bench, "collect", lambda name, out: {"machine": "m", "seeds": [0, 1], "rows": [], "x": value})
    bench.main()


def test_measurements_are_written_as_valid_json_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "train_run", lambda run, seed, train: 0)
    run_main(tmp_path, monkeypatch, 1.5)
    assert json.loads((tmp_path / "found.json").read_text())["x"] == 1.5
    for value in (float("nan"), float("inf")):
        with pytest.raises(SystemExit, match=r"^error: a measurement is not a finite number$"):
            run_main(tmp_path, monkeypatch, value)
    assert json.loads((tmp_path / "found.json").read_text())["x"] == 1.5


def test_errors_of_runs_are_one_line(tmp_path, monkeypatch):
    def fail(run, seed, train):
        raise ConfigError("seed0 holds a run of another config")

    monkeypatch.setattr(bench, "train_run", fail)
    with pytest.raises(SystemExit, match=r"^error: seed0 holds a run of another config$"):
        run_main(tmp_path, monkeypatch, 1.5)


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
    matrices = weights_of(parts.ablated(params, parts.BRANCHES, [1], [2]))
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
    gone = parts.ablated(params, parts.BRANCHES, [0, 1], [0, 1, 2])
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
    for branch in parts.BRANCHES:
        where, side = branch.split(", ")
        without, expected = weights(parts.ablated(params, [branch], [0, 1], [0, 1, 2])), {}
        for name in ("pre", "post"):
            gone = {f"{side[0]}{part}": None for part in "12g"} if name == where else {}
            expected[name] = composed_by(a, whole[name]._replace(**gone))
            np.testing.assert_allclose(composed_by(a, without[name]), expected[name], atol=1e-5)
        assert np.abs(composed_by(a, whole[where]) - expected[where]).max() > 0.1


@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_measures_of_a_run_agree_with_its_metrics_and_are_stored(tmp_path):
    tiny = {"model.width": 16, "model.depth": 1, "model.num_heads": 2, "model.mlp_dim": 16}
    tiny |= {"evals.validation.data.limit": 116, "evals.validation.batch_size": 58}
    run = Run(tmp_path, "lm_synthetic:steps=2", tiny, "validation/accuracy")
    assert seeded.train_run(run, 0, train.main) == 0
    found = parts.measure(tmp_path / "seed0")
    weights = {"first": 13, "last": 13, "in": 13, "unlike": 6, "odd": 13}  # tasks of each pattern
    assert found["patterns"].keys() == weights.keys()
    mean = sum(found["patterns"][name] * count for name, count in weights.items()) / 58
    assert mean == pytest.approx(100 * seeded.final(tmp_path / "seed0", run.metric))
    assert [*found["drops"]] == [*parts.BRANCHES, "all branches", *(f"layer 0, head {i} by drop" for i in (1, 2))]
    by_head = [*found["drops"].values()][-2:]
    assert by_head == sorted(by_head, reverse=True)
    assert found == parts.measure(tmp_path / "seed0")
