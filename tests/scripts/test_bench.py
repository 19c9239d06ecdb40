"""Benchmarks run with small sizes, and the arms that they compare differ in what they are named for only."""

import math

import dcmha as bench_dcmha
import input as bench_input
import jax
import numpy as np
import pytest
import runs as bench_runs
import synthetic_parts
import train as bench_train
from fake_training import write_run
from small_models import HEADS, LENGTH, jit, make_lm, make_tokens

from dcvit.config.load import load
from dcvit.dcmha.backends.xla.reference import compose
from dcvit.reproduction.seeded import run_checksum, stored
from dcvit.reproduction.speeds import StepTimes


@pytest.mark.slow
def test_table_of_attention_compares_every_implementation_with_plain_attention():
    rows = bench_dcmha.table("tiny", bench_dcmha.Shape(1, 8, 2, 8, step=True), rounds=1)
    assert {row["row"] for row in rows} == {
        "plain, XLA", "plain, jax.nn", "DC, reference", "plain, decode", "DC, decode", "grouped, best", "folded, best",
        "DC weights", "folded weights", "combine, sum", "combine, product",
    }  # fmt: skip
    assert all(math.isfinite(row["ratio"]) and row["ms_min"] <= row["ms"] <= row["ms_max"] for row in rows)


@pytest.mark.weekly
def test_the_input_pipeline_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_input, "BATCH", 2)
    monkeypatch.setattr(bench_input, "BATCHES", 1)
    result = bench_input.measure(bench_input.prepare(str(tmp_path), 16), rounds=1, batches=10)
    assert len(speeds := result["images_per_second"]) == 5
    assert all(0 < speed["min"] <= speed["median"] <= speed["max"] for speed in speeds.values())
    assert result["share_of_ceiling"][bench_input.DECODER]["median"] == 1


@pytest.mark.parametrize("build", [bench_train.vision(1, "float32"), bench_train.language("405M", 2, 1, "float32")])
@pytest.mark.parametrize(("composed", "plain"), [("DC, best", "plain, best"), ("folded, best", "grouped, best")])
def test_the_rows_of_a_ratio_differ_in_the_composition_only(build, composed, plain):
    """Windows, QK-norm, key heads and rematerialization would change the time, too."""
    first, second = (build(bench_train.ROWS[row])[0] for row in (composed, plain))
    fields = {name for name in vars(first) if not name.startswith("_") and name not in ("parent", "name")}
    differing = {name for name in fields if getattr(first, name) != getattr(second, name)}
    assert "compose" in differing
    assert differing <= {"compose", "branches", "groups", "static"}


@pytest.mark.parametrize(
    ("name", "control", "long", "longer"),
    [("synthetic", "plain", "plain, equal time", 1.8), ("scenes", "ViT", "ViT, equal time", 2.0)],
)
def test_tables_pair_the_complete_runs_of_arms_that_differ_in_composition_and_steps_only(
    name, control, long, longer, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench_runs, "step_times", lambda arms, _: StepTimes(dict.fromkeys(arms, 12.5), "a machine"))
    runs = bench_runs.BENCHMARKS[name].runs(tmp_path, 0)
    configs = {arm: load(run.spec, run.words(0)) for arm, run in runs.items()}
    steps = {arm: config.total_steps for arm, config in configs.items()}
    assert steps == {arm: round(steps[control] * (longer if arm == long else 1)) for arm in runs}
    for config in configs.values():
        with config.unlocked(), config.ignore_type():
            config.model.compose = config.model.branches = config.total_steps = None
    assert len({config.to_json() for config in configs.values()}) == 1
    for seed in range(3):
        for i, (arm, run) in enumerate(runs.items()):
            value, workdir = 0.5 + 0.01 * seed + 0.02 * i, run.folder / f"seed{seed}"
            write_run(workdir, {"total_steps": 9, "seed": seed}, {run.metric: value})
            if seed == 2 and i >= 2:  # not complete
                (workdir / "metrics.jsonl").write_text(f'{{"step": 3, "{run.metric}": {value}}}\n')
            drops = {"all branches": 10.0 + seed} if arm == bench_runs.COMPLETE else {}
            measured = {"patterns": {"in": 100 * value}, "drops": drops}
            stored(workdir / "parts.json", run_checksum(workdir), lambda measured=measured: measured)
    result = bench_runs.collect(name, tmp_path)
    assert result["seeds"] == [0, 1]
    for i, row in enumerate(result["rows"]):
        assert row["mean"] == pytest.approx(50.5 + 2 * i)
        assert row["interval"] == pytest.approx(6.353, rel=1e-3)  # t of one degree of freedom times the standard error
        assert row["difference"] == pytest.approx(2 * i)
        assert row["difference_interval"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_branch_or_a_head_is_ablated_alone():
    """The composition is that of the same weights with the branch left out; no other head contributes to the head."""
    net, params = make_lm(compose="both", depth=1)
    heads = [*range(HEADS)]

    @jit
    def weights(params):
        _, state = net.apply(
            {"params": params}, make_tokens(), mutable=["intermediates"],
            capture_intermediates=lambda module, method: method == "compose_weights",
        )  # fmt: skip
        attention = state["intermediates"]["Transformer"]["decoderblock_0"]["MultiHeadDotProductAttention_0"]
        return attention["compose_weights"][0]

    a = jax.random.normal(jax.random.key(5), (2, HEADS, LENGTH, LENGTH))
    whole, composed_by = weights(params), jit(compose)
    for branch in synthetic_parts.BRANCHES:
        where, side = branch.split(", ")
        without, expected = weights(synthetic_parts.ablated(params, [branch], [0], heads)), {}
        for name in ("pre", "post"):
            gone = {f"{side[0]}{part}": None for part in "12g"} if name == where else {}
            expected[name] = composed_by(a, whole[name]._replace(**gone))
            np.testing.assert_allclose(composed_by(a, without[name]), expected[name], atol=1e-5)
        assert np.abs(composed_by(a, whole[where]) - expected[where]).max() > 0.1
    alone = composed_by(a, weights(synthetic_parts.ablated(params, synthetic_parts.BRANCHES, [0], [2]))["pre"])
    expected = composed_by(a, whole["pre"]).at[:, 2].set(a[:, 2])
    np.testing.assert_allclose(alone, expected, atol=1e-5)
