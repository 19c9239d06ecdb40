"""Table 6: measured rates and their ratios, models of the measurement, and estimates of a file."""

import itertools
import json

import pytest

from dcvit.config import load as config
from dcvit.hub.kinds import make_model
from dcvit.models import presets
from dcvit.reproduction import arms, overhead, rounds


@pytest.mark.parametrize(
    ("arm", "preset"), [(overhead.PLAIN, "Transformer++-6.9B"), (overhead.COMPOSED, "DCFormer++-6.9B")]
)
def test_measured_models_are_those_of_the_paper_in_small(arm, preset):
    expected = {k: v for k, v in presets.PRESETS[preset].items() if k not in ("depth", "width", "num_heads", "mlp_dim")}
    (spec, words), net = overhead.runs_of((32, 2, 4))[arm], overhead.nets_of((32, 2, 4))[arm]
    trained = make_model(config.load(spec, [*words, f"model.context={overhead.LENGTH}"]))  # as the data sets it
    for found in (trained, net):
        assert {key: getattr(found, key) for key in expected} == expected
        assert (found.context, found.qk_norm) == (overhead.LENGTH, None)
    assert arm == overhead.PLAIN or trained.window == net.window == overhead.LENGTH // 8


def test_models_with_the_same_windows_differ_from_plain_ones_in_nothing_else():
    fields = overhead.fields((32, 2, 4))
    same = {key: value for key, value in fields[overhead.SAME].items() if fields[overhead.PLAIN].get(key, ()) != value}
    assert same == {key: fields[overhead.COMPOSED][key] for key in ("window", "window_pattern")}


@pytest.mark.exhaustive
def test_rates_count_new_tokens_from_the_first_to_the_last_and_rounds_after_the_first(monkeypatch):
    clock, order = itertools.count(step=2), []

    def generate(net, params, prompts, options):
        order.append((net, len(prompts), {len(prompt) for prompt in prompts}))
        yield from [[0] * len(prompts)] * options.max_tokens

    monkeypatch.setattr(rounds, "generate", generate)
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: float(next(clock)))
    nets = {
        name: arms.language_model({"width": width, "depth": 1, "num_heads": 2}) for name, width in (("a", 8), ("b", 16))
    }
    rates = rounds.decoding_rates(nets, batch=3, prompt=5, tokens=9, rounds=2)
    assert rates == {"a": [3 * 8 / 2] * 2, "b": [3 * 8 / 2] * 2}
    assert order == [(nets[name], 3, {5}) for name in "ababab"]


def test_speed_is_the_median_of_the_ratios_of_a_round():
    rates = {overhead.PLAIN: [10.0, 20.0, 40.0], overhead.SAME: [5.0] * 3, overhead.COMPOSED: [8.0, 10.0, 36.0]}
    row = overhead.measured_row("64×2 training, measured", rates, overhead.PLAIN)
    assert (row["TFM++"], row["DCFM++"], row["speed %"], row["range %"]) == (20, 10, 80, "50.0–90.0")
    assert row["paper %"] is None
    assert overhead.measured_row("x", rates, overhead.SAME)["case"] == "x, same windows"


def test_estimates_are_of_pairs_with_the_same_config_and_slice(tmp_path):
    def one(config, seconds, topology="v5e:4x4", examples=2):
        return {"config": config, "seconds": seconds, "topology": topology, "examples": examples}

    path = tmp_path / "tpu_step.json"
    assert overhead.estimates(path) == []
    stored = [
        one("vit_i1k:variant=DCViT-S/16", 1), one("lm_pile:preset=Transformer++-2.8B", 3),
        one("lm_pile:preset=DCFormer++-2.8B", 4), one("lm_pile:preset=DCFormer++-2.8B", 4, "v5e:8x8"),
        one("lm_pile:preset=DCFormer++-405M,grad_accum=2 model.rank=1", 2),
        one("lm_pile:preset=Transformer++-405M,grad_accum=2 model.rank=1", 1),
    ]  # fmt: skip
    path.write_text(json.dumps(stored))
    large, small = overhead.estimates(path)
    assert (large["speed %"], large["paper %"]) == (75, 74.5)
    assert (small["speed %"], small["paper %"]) == (50, None)


@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion")
def test_small_models_train_and_generate_in_rounds(monkeypatch):
    for name, value in {"ROUNDS": 1, "LENGTH": 32, "PROMPT": 8, "NEW": 4}.items():
        monkeypatch.setattr(overhead, name, value)
    rows = overhead.measured((16, 1, 2))
    assert len({row["case"] for row in rows}) == len(rows) == 6
    assert all(row["TFM++"] > 0 and row["speed %"] > 0 for row in rows)
