"""Tables 7 and 8: the ViTs of the paper, counted, and small ViTs on embedded images as stand-ins for ImageNet-1k.

On each stand-in a ViT and a DCViT train for the same number of steps, and another DCViT for as many steps as take the
time of the ViT's, with the complete schedule of the learning rate over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from dcvit.config.load import load
from dcvit.models import flops
from dcvit.models.trees import param_shapes
from dcvit.models.vit import ViT
from dcvit.reproduction import arms, seeded, step_times
from dcvit.reproduction.seeded import Train
from dcvit.reproduction.tables import Chart, Row, Table
from dcvit.training.model import make_model
from dcvit.training.seeds import workdir_of

STEPS, METRIC = 1500, "test/top1"
STAND_INS = {"digits": "vit_digits", "scenes": "vit_scenes"}  # by name, the config
PLAIN, COMPOSED, TIMED = "ViT", "DCViT", "DCViT, equal time"
ATTENTION = {PLAIN: "mha", COMPOSED: "dcmha", TIMED: "dcmha"}
# The paper's top-1 accuracy of (DC)ViT-S/16 after 90 and 300 epochs.
PAPER: dict[str, tuple[float | None, float | None]] = {PLAIN: (65.2, 79.8), COMPOSED: (68.0, 80.1), TIMED: (None, None)}
# The paper's parameters in millions (Table 7) and relative sizes (Table 8).
SIZES = {"ViT-S/16": (22, 1.0), "DCViT-S/16": (22, 1.03), "ViT-M/16": (39, 1.72)}


def table7() -> Table:
    """Return the shapes, parameters and operations of the paper's models, counted."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    nets = {name: _paper_model(name) for name in SIZES}
    parameters = [sum(leaf.size for leaf in jax.tree.leaves(param_shapes(net, image))) for net in nets.values()]
    operations = [flops.vit_flops(net, image.shape[1:]) for net in nets.values()]
    rows: list[Row] = [
        {
            "model": name, "layers": net.depth, "width": net.width, "MLP width": net.mlp_dim, "heads": net.num_heads,
            "parameters": parameters[i], "parameters in millions, paper": SIZES[name][0],
            "relative parameters": parameters[i] / parameters[0],
            "relative FLOPs": operations[i] / operations[0], "relative size, paper": SIZES[name][1],
        }
        for i, (name, net) in enumerate(nets.items())
    ]  # fmt: skip
    note = (
        "Models of configs/vit_i1k.py for images of 224×224 pixels; FLOPs by dcvit.models.flops. The relative size is "
        "that of the paper's Table 8. Accuracy on stand-ins for ImageNet-1k is in table8."
    )
    return Table("table7", "Table 7: ViT architectures", rows, (note,))


def _paper_model(name: str) -> ViT:
    net = make_model(load(f"vit_i1k:variant={name}"))
    assert isinstance(net, ViT)
    return net


def run_of(data: str, model: str, steps: int, seed: int) -> tuple[str, list[str]]:
    """Return the config of a run and its overrides."""
    words = {"total_steps": steps, "seed": seed, "tensorboard": False, "evals.test.log_percent": 100}
    return f"{STAND_INS[data]}:attention={ATTENTION[model]}", [f"{key}={value}" for key, value in words.items()]


def times_of(runs: Path, data: str) -> step_times.StepTimes:
    """Return the times of a step of both models on a stand-in, measured when they are first needed."""
    return step_times.step_times({name: run_of(data, name, STEPS, 0) for name in (PLAIN, COMPOSED)}, runs / data)


def steps_of(runs: Path, data: str, steps: int) -> dict[str, int]:
    """Return the steps of each model on a stand-in."""
    at_equal_time = arms.steps_at_equal_time(times_of(runs, data), steps)
    return {PLAIN: steps, COMPOSED: steps, TIMED: at_equal_time[COMPOSED]}


def folders_of(runs: Path, data: str) -> dict[str, Path]:
    """Return the folders of the models' runs on a stand-in."""
    folder = runs / data
    return {name: arms.folder_of(folder, name) for name in (PLAIN, COMPOSED)} | {
        TIMED: arms.timed_folder_of(folder, COMPOSED)
    }


def train(runs: Path, seeds: Sequence[int], train: Train, steps: int) -> int:
    """Train all models, seed by seed, and return the exit status of the first run that fails, or 0.

    Raises:
      ConfigError, MetricsError: see `dcvit.reproduction.seeded.run`.
    """
    for data in STAND_INS:
        each, folders = steps_of(runs, data, steps), folders_of(runs, data)
        for seed in seeds:
            for name, count in each.items():
                spec, words = run_of(data, name, count, seed)
                if status := seeded.run(train, spec, workdir_of(folders[name], seed), words, METRIC):
                    return status
    return 0


def table8(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the accuracy of complete runs.

    Raises:
      ConfigError: a run is not complete, or the runs of a model differ in more than their seed.
    """
    rows: list[Row] = []
    verdicts: list[str] = []
    for data in STAND_INS:
        finals = seeded.all_finals(runs, folders_of(runs, data), seeds, METRIC)
        percent = {seed: {name: 100 * x for name, x in each.items()} for seed, each in finals.items()}
        paired = {seed: {name: x - each[PLAIN] for name, x in each.items()} for seed, each in percent.items()}
        top1, difference = arms.summary(percent), arms.summary(paired)
        rows += _rows(runs, data, steps, seeds, top1, difference)
        for name, equal in ((COMPOSED, "steps"), (TIMED, "time")):
            verdict = arms.decision(difference[0][name], difference[1][name], lower=False, decimals=2)
            verdicts.append(f"- DCViT is more accurate than ViT on {data} at equal {equal}: {verdict}")
    return Table("table8", "Table 8: image classification on stand-ins for ImageNet-1k", rows,
                 (_about(runs, seeds, steps), _statements(verdicts)),
                 Chart("model", "top-1 %", "± 95 %", "ImageNet-1k, 300 epochs, paper"))  # fmt: skip


Summary = tuple[Mapping[str, float], Mapping[str, float | None]]


def _rows(
    runs: Path, data: str, steps: int, seeds: Sequence[int], top1: Summary, difference: Summary
) -> list[Row]:  # fmt: skip
    """Return the rows of a stand-in from means and intervals, in percent."""
    counts, folders, times = steps_of(runs, data, steps), folders_of(runs, data), times_of(runs, data)
    return [
        {
            "model": name.replace("ViT", f"ViT on {data}"),
            "parameters": seeded.parameters(workdir_of(folders[name], seeds[0])),
            "steps": counts[name], "step ms": times.ms[PLAIN if name == PLAIN else COMPOSED],
            "top-1 %": top1[0][name], "± 95 %": top1[1][name],
            "difference": difference[0][name], "difference ± 95 %": difference[1][name],
            "ImageNet-1k, 90 epochs, paper": early, "ImageNet-1k, 300 epochs, paper": late,
        }
        for name, (early, late) in PAPER.items()
    ]  # fmt: skip


def _about(runs: Path, seeds: Sequence[int], steps: int) -> str:
    """Return the settings of the runs as a note."""
    machine = times_of(runs, next(iter(STAND_INS))).machine
    return (
        "Stand-ins for ImageNet-1k: scikit-learn's handwritten digits (configs/vit_digits.py, 360 test images) and "
        "scenes of them that ask for a relation (configs/vit_scenes.py, 1,024 test images), both of ten classes, with "
        f"models of two layers, width 64 and four heads after {steps} steps of 64 images. Top-1 accuracy on the test "
        f"split; seeds {', '.join(map(str, seeds))}; intervals of Student's t distribution. Differences are to the ViT "
        "with the same seed. “Equal time” is another run, for as many steps as take the time of the ViT, with a "
        f"complete schedule of the learning rate. Times of a step are medians of {step_times.ROUNDS} interleaved "
        f"rounds, without compilation, data and evaluations, on {machine}; other processes change them."
    )


def _statements(verdicts: Sequence[str]) -> str:
    """Return the paper's statements with their results."""
    lines = "\n".join(verdicts)
    return (
        "The paper's columns are the top-1 accuracy of (DC)ViT-S/16 on ImageNet-1k after equal epochs; it says that "
        "DCViT-S/16 outperforms ViT-S/16. With the differences of paired seeds in percentage points:\n\n"
        f"{lines}\n\nNot tested here: that DCViT-S/16 is on par with ViT-M/16 (67.1 and 80.3), a model 1.72 "
        "times as large, and the top-5 accuracy. `dcvit reproduce table8 --scale full` prints the commands of the "
        "runs on ImageNet-1k."
    )
