"""Benchmarks of configs: their figures follow from each other, no data is read, and memory bounds what is timed."""

import collections
import functools
import itertools
from types import SimpleNamespace

import jax
import pytest

from dcvit.parallel import topologies
from dcvit.training import measure, timing
from dcvit.training.setup import load_setup

pytestmark = pytest.mark.usefixtures("library_promotion")
VIT = ("vit_folder:data_dir=/nowhere,variant=ViT-mu/16,res=32", ["num_classes=7", "model.depth=1"])
LM = (
    "lm_text:data_dir=/nowhere,context=16",
    ["model.width=16", "model.depth=1", "model.num_heads=2", "model.mlp_dim=24"],
)


@functools.cache
def measured(kind, mode):
    """The row of a mode; all eight devices of the tests share a batch."""
    spec, words = {"vit": VIT, "lm": LM}[kind]
    (row,) = measure.benchmark([spec], words, [mode], [16], rounds=3)
    return SimpleNamespace(**row)


def flops_by_hand(kind):
    """2 × multiply-adds of an image of 4 patches of 16×16×3, or of a row of 16 tokens, by the sizes above."""
    if kind == "vit":
        (net, tokens), head = (load_setup(VIT[0], VIT[1], stand_in=True).model.module, 4), 7
        m, f, pairs = net.width, net.mlp_dim or 4 * net.width, tokens**2
        return 2 * (tokens * 768 * m + 4 * tokens * m * m + 2 * pairs * m + 2 * tokens * m * f + m * head)
    tokens, m, f, pairs = 16, 16, 24, 16 * 17 // 2
    return 2 * (4 * tokens * m * m + 2 * pairs * m + 3 * tokens * m * f + tokens * m * 257)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"), [("vit", "train"), pytest.param("lm", "forward", marks=pytest.mark.exhaustive)]
)
def test_the_figures_of_a_row_follow_from_each_other(kind, mode):
    row, tokens = measured(kind, mode), {"vit": 1, "lm": 16}[kind]
    assert (row.error, row.batch, row.device, row.dtype) == (None, 16, f"8 × {jax.devices()[0].device_kind}", "float32")
    assert row.unit == {"vit": "img/s", "lm": "tok/s"}[kind]
    assert row.attention == "reference"
    assert row.gflops == pytest.approx({"train": 3, "forward": 1}[mode] * flops_by_hand(kind) / tokens / 1e9)
    assert 0 < row.ms_q1 <= row.ms <= row.ms_q3
    assert row.rate == pytest.approx(16 * tokens / row.ms * 1000)
    assert row.tflops == pytest.approx(row.gflops * row.rate / 1000)
    assert row.ratio == 1
    assert row.compile_s > 0


@pytest.mark.exhaustive
def test_parameters_and_memory_are_those_of_the_training_step():
    setup = load_setup(VIT[0], [*VIT[1], "input.batch_size=16"], stand_in=True)
    lowered, state = measure.lower(setup)
    sizes, row = lowered.compile().memory_analysis(), measured("vit", "train")
    assert row.parameters == sum(leaf.size for leaf in jax.tree.leaves(state.params))
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    assert row.memory_mb == (total + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes) / 1e6


def test_steps_are_timed_in_random_order_and_the_first_of_each_turn_is_not_timed(monkeypatch):
    order, clock = [], itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    steps = {name: functools.partial(order.append, name) for name in "abc"}
    assert timing.interleaved(steps, 20) == {name: [1.0] * 20 for name in "abc"}
    turns = [tuple(order[i : i + 6]) for i in range(0, len(order), 6)]
    assert all(collections.Counter(turn) == dict.fromkeys("abc", 2) and turn[::2] == turn[1::2] for turn in turns)
    assert len({*turns}) > 3
    before = [*order]
    order.clear()
    timing.interleaved(steps, 20)
    assert order == before


def test_utilization_is_that_of_the_chips(monkeypatch):
    chip = topologies.Chip("chip", 0, 8e12, ("cpu",))
    monkeypatch.setattr(topologies, "chip", lambda kind: chip)
    data, task = SimpleNamespace(batch_size=10), SimpleNamespace(rate=("img/s", 1))
    model = SimpleNamespace(mesh=jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    program = object.__new__(measure.Program)
    program.setup = SimpleNamespace(data=data, task=task, model=model)
    row = measure._figures(program, 40.0, [0.1, 0.1])
    assert [row[name] for name in ("ms", "rate", "tflops", "mfu")] == pytest.approx([100, 100, 4, 25.0])
    monkeypatch.setattr(topologies, "chip", lambda kind: None)
    assert measure._figures(program, 40.0, [0.1])["mfu"] is None  # an unknown device
