"""Compositions of models with grouped queries: what is kept if heads compose only inside the groups of a key head.

For 1, 2 and 4 key heads, the eight heads of a small language model do not compose, compose query-wise inside the groups
of a key head (DCFlash, which plain attention computes), query-wise all together, or completely. With one key head, the
second and the third are the same. A ViT with two key heads has the same four arms.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcvit.reproduction import arms, costs, seeded, step_times
from dcvit.reproduction.arms import Arm, Claim
from dcvit.reproduction.seeded import Train
from dcvit.reproduction.table9 import about, row
from dcvit.reproduction.tables import Cell, Chart, Table
from dcvit.training.seeds import workdir_of

PLAIN, FOLDED, QUERY_WISE, COMPLETE = "plain", "DCFlash", "query-wise", "complete"
KEY_HEADS = (1, 2, 4)
IMAGES, IMAGE_KEY_HEADS = "images", 2
IMAGE_METRIC = "test/top1"
IMAGE_STEPS = 1500  # for `arms.STEPS` steps of a language model


def fields_of(key_heads: int) -> dict[str, dict[str, object]]:
    """Return the fields of the attention of each composition."""
    found: dict[str, dict[str, object]] = {
        PLAIN: {"compose": "None"},
        FOLDED: {"compose": "both", "branches": "q", "groups": key_heads},
        QUERY_WISE: {"compose": "both", "branches": "q"},
        COMPLETE: {"compose": "both"},
    }
    if key_heads == 1:
        del found[FOLDED]
    return {name: {**fields, "num_key_heads": key_heads} for name, fields in found.items()}


def arm_of(key_heads: int, name: str) -> str:
    """Return the name of a language model."""
    return f"K={key_heads} {name}"


def arms_of(key_heads: int) -> dict[str, Arm]:
    """Return the language models with a number of key heads; the first one does not compose."""
    return {arm_of(key_heads, name): Arm(fields) for name, fields in fields_of(key_heads).items()}


def folder_of(runs: Path, key_heads: int) -> Path:
    """Return the folder of the language models with a number of key heads."""
    return runs / f"K={key_heads}"


def image_run(name: str, steps: int, seed: int) -> tuple[str, list[str]]:
    """Return the config of a run of a ViT, and its overrides."""
    fields = {"num_heads": arms.MODEL["num_heads"], **fields_of(IMAGE_KEY_HEADS)[name]}
    words = {f"model.{key}": value for key, value in fields.items()}
    words |= {"total_steps": image_steps(steps), "seed": seed, "tensorboard": False, "evals.test.log_percent": 100}
    return "vit_digits:attention=dcmha", [f"{key}={value}" for key, value in words.items()]


def image_steps(steps: int) -> int:
    """Return the steps of a ViT, in proportion to those of a language model."""
    return max(1, round(steps * IMAGE_STEPS / arms.STEPS))


def image_folders(runs: Path) -> dict[str, Path]:
    """Return the folders of the ViTs."""
    return {name: arms.folder_of(runs / IMAGES, name) for name in fields_of(IMAGE_KEY_HEADS)}


def image_times(runs: Path) -> step_times.StepTimes:
    """Return the times of a step of the ViTs, measured when they are first needed."""
    return step_times.step_times({name: image_run(name, arms.STEPS, 0) for name in image_folders(runs)}, runs / IMAGES)


def train(runs: Path, seeds: Sequence[int], train: Train, steps: int) -> int:
    """Train all models, and return the exit status of the first run that fails, or 0.

    Raises:
      ConfigError, MetricsError: see `dcvit.reproduction.seeded.run`.
    """
    image_times(runs)
    for n in KEY_HEADS:
        arms.times_of(arms_of(n), folder_of(runs, n))  # all times before any training
    for seed in seeds:
        for n in KEY_HEADS:
            if status := arms.train_arms(arms_of(n), folder_of(runs, n), [seed], train, steps):
                return status
        for name, folder in image_folders(runs).items():
            spec, words = image_run(name, steps, seed)
            if status := seeded.run(train, spec, workdir_of(folder, seed), words, IMAGE_METRIC):
                return status
    return 0


def table(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of complete runs.

    Raises:
      ConfigError: a run is not complete, or the runs of an arm differ in more than their seed.
    """
    images = image_columns(runs, seeds, steps)
    rows, statements = [], []
    for n in KEY_HEADS:
        found = arms.compare(arms_of(n), folder_of(runs, n), seeds, steps)
        for name, (arm, model) in zip(fields_of(n), arms_of(n).items(), strict=True):
            more: dict[str, Cell] = {
                "cache per token": costs.cache_per_token(arms.model_of({**arms.MODEL, **model.fields}), arms.CONTEXT)
            }
            more |= images[name] if n == IMAGE_KEY_HEADS else dict.fromkeys(images[name])
            rows.append(row(arm, found, more))
        for claim in claims_of(n):
            statements.append(f"- {claim.text}: {arms.verdict(claim, found)}")
    vits = (
        f"ViTs of configs/vit_digits.py with {arms.MODEL['num_heads']} heads and {IMAGE_KEY_HEADS} key heads after "
        f"{image_steps(steps)} steps: top-1 accuracy on the test split, and differences in percentage points."
    )
    differences = "With the differences in bits per byte of paired seeds, at equal steps:\n\n" + "\n".join(statements)
    notes = (about(found, steps, "the plain row of as many key heads"), vits, differences)
    return Table(
        "key_heads", "Composition with grouped queries", rows, notes, Chart("config", "bits per byte", "± 95 %")
    )


def image_columns(runs: Path, seeds: Sequence[int], steps: int) -> dict[str, dict[str, Cell]]:
    """Return the columns of the ViTs by the name of their composition."""
    finals = seeded.all_finals(runs, image_folders(runs), seeds, IMAGE_METRIC)
    percent = {seed: {name: 100 * value for name, value in each.items()} for seed, each in finals.items()}
    paired = {seed: {name: value - each[PLAIN] for name, value in each.items()} for seed, each in percent.items()}
    (means, intervals), (differences, widths) = arms.summary(percent), arms.summary(paired)
    times = image_times(runs).ms
    return {
        name: {
            "ViT step ms": times[name], "ViT top-1 %": means[name], "ViT ± 95 %": intervals[name],
            "ViT difference": differences[name], "ViT difference ± 95 %": widths[name],
        }
        for name in means
    }  # fmt: skip


def claims_of(key_heads: int) -> list[Claim]:
    """Return the statements about the models with a number of key heads."""

    def claim(text: str, better: str, worse: str) -> Claim:
        return Claim(f"with {key_heads} of {arms.MODEL['num_heads']} key heads, {text}", *(
            arm_of(key_heads, name) for name in (better, worse)
        ))  # fmt: skip

    folded = QUERY_WISE if key_heads == 1 else FOLDED
    return [
        claim("composition inside key heads improves plain attention", folded, PLAIN),
        claim("complete composition improves plain attention", COMPLETE, PLAIN),
        claim("complete composition is better than composition inside key heads", COMPLETE, folded),
    ]
