"""Comparisons that are not in the paper: cross-head attention by name, and compositions with grouped queries.

`heads`: the names of `dcvit.models.head_settings` are trained on embedded text, as `dcvit.reproduction.arms` describes,
and on the generated tasks of `configs/lm_synthetic.py`, in FOLDER/NAME=synthetic/seedN.

`key_heads`: how much of the gain remains if heads compose only with heads of the same key head. A small language model
with eight heads and 1, 2 or 4 key heads has four arms: plain; composed query-wise inside the group of each key head
(DCFlash, which plain attention computes); composed query-wise among all heads; and completely composed. With one key
head, the second and the third are equal. A ViT with two key heads has the same four arms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcvit.config.load import ROOT
from dcvit.models import flops, head_settings, lm
from dcvit.reproduction import arms, costs
from dcvit.reproduction.arms import Claim, Group
from dcvit.reproduction.seeded import Run, folder_of, of_model
from dcvit.reproduction.tables import Cell, Chart, Table

ELSEWHERE = ("folded_post", "dcmha_post")  # measured by `dcvit.reproduction.equal_time`
# Two heads share a key head, so that all names are possible.
ARMS: dict[str, dict[str, object]] = {
    **{name: {"heads": name, "num_key_heads": 4} for name in head_settings.NAMES if name not in ELSEWHERE},
    "dcmha, rank 1": {"heads": "dcmha", "rank": 1, "num_key_heads": 4},
}
ACCURACY = "validation/accuracy"
TASK_STEPS = 2000  # of runs on generated tasks, for `arms.STEPS` steps of those on text
TASK_KEY_HEADS = 2  # of four heads
TASK_LR = 3e-3  # the learning rate of scripts/bench/runs.py
ESTIMATES = ROOT / "docs" / "tpu_heads.json"  # of scripts/tpu/step.py; not in a package


def plan(folder: Path, steps: int) -> list[Run]:
    """Return the runs of `heads`, the comparison by name: those on text, and those on generated tasks."""
    return [*arms.language_models(folder, ARMS).plan(steps), *task_runs(folder, steps).values()]


def task_runs(folder: Path, steps: int) -> dict[str, Run]:
    """Return, by name, the runs on generated tasks; `steps` are those of the runs on text, see `steps_of`."""
    spec = f"lm_synthetic:steps={steps_of(steps, TASK_STEPS)}"
    found = {}
    for name, fields in ARMS.items():
        overrides = {**of_model({**fields, "num_key_heads": TASK_KEY_HEADS}), "lr": TASK_LR}
        found[name] = Run(folder_of(folder, f"{name}=synthetic"), spec, overrides, ACCURACY)
    return found


def steps_of(steps: int, at_default: int) -> int:
    """Return at_default·steps/`arms.STEPS`, at least 1: a run's default steps, scaled like those of the text models."""
    return max(1, round(steps * at_default / arms.STEPS))


def table(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of `heads`, with the results of the runs of `plan`, which must be complete."""
    found = arms.compare(arms.language_models(folder, ARMS), seeds, steps)
    accuracies = arms.measure(task_runs(folder, steps), seeds, scale=100).means
    rows, seconds = [], tpu_seconds(ESTIMATES)
    for name in ARMS:
        net = model_of(name)
        more: dict[str, Cell] = {
            "MFLOP per token": flops.lm_flops(net, arms.CONTEXT) / arms.CONTEXT / 1e6,
            "cache per token": costs.cache_per_token(net, arms.CONTEXT),
            "flash": "yes" if is_flash(net) else "no",
            "405M on TPU v5e, s": seconds.get(name),
            **accuracies[name].cells("accuracy on tasks %", "accuracy on tasks ± 95 %"),
        }
        rows.append(arms.row(name, found, more))
    tasks = (
        "The accuracy on tasks is that of other models, trained by configs/lm_synthetic.py for "
        f"{steps_of(steps, TASK_STEPS)} steps on the generated tasks of docs/composed_tasks.md, and evaluated on their "
        f"validation split. They have four heads and two key heads, and the learning rate is {TASK_LR} for all."
    )
    tpu = (
        "The column of the TPU is the compiler's estimate of a training step of a model of 405M parameters, with 16 "
        "heads and 8 key heads, on a slice v5e:4x4 (docs/tpu_heads.json, by scripts/tpu/step.py). There is none of "
        "`diff`, whose layers differ and cannot be scanned."
    )
    notes = (arms.about(found, steps), tasks, *([tpu] if seconds else []))
    return Table("heads", "Leaderboard of cross-head attention", rows, notes,
                 Chart("config", "bits per byte", "± 95 %"))  # fmt: skip


def tpu_seconds(path: Path) -> dict[str, float]:
    """Return the seconds of a TPU's training step by cross-head attention, from scripts/tpu/step.py's file, or {}."""
    if not path.is_file():
        return {}
    estimates: Sequence[Mapping[str, object]] = json.loads(path.read_text())
    found = {}
    for each in estimates:
        fields = dict(re.findall(r"model[.](\w+)=(\w+)", str(each["config"])))
        if "heads" in fields:
            rank = f", rank {fields['rank']}" if "rank" in fields else ""
            found[f"{fields['heads']}{rank}"] = float(str(each["seconds"]))
    return found


def model_of(name: str) -> lm.LM:
    """Return the language model with the cross-head attention `name` of `dcvit.models.head_settings`."""
    return arms.language_model({**arms.MODEL, **ARMS[name]})


def is_flash(net: lm.LM) -> bool:
    """Return True if fused implementations of plain attention (flash attention) can compute a model's attention."""
    return net.compose is None or net.composition().foldable(net.num_key_heads or net.num_heads)


PLAIN, FOLDED, QUERY_WISE, COMPLETE = "plain", "DCFlash", "query-wise", "complete"
KEY_HEADS = (1, 2, 4)
IMAGE_KEY_HEADS, IMAGE_METRIC = 2, "test/top1"
IMAGE_STEPS = 1500  # for `arms.STEPS` steps of a language model


def fields_of(key_heads: int) -> dict[str, dict[str, object]]:
    """Return, by name, the fields of the models that are compared for a number of key heads: four, or three for 1."""
    found: dict[str, dict[str, object]] = {
        PLAIN: {"compose": None},
        FOLDED: {"compose": "both", "branches": "q", "groups": key_heads},
        QUERY_WISE: {"compose": "both", "branches": "q"},
        COMPLETE: {"compose": "both"},
    }
    if key_heads == 1:
        del found[FOLDED]
    return {name: {**fields, "num_key_heads": key_heads} for name, fields in found.items()}


def key_head_models(folder: Path, key_heads: int) -> Group:
    """Return the language models of `fields_of`, to train in `folder`, as a `Group` to compare with the plain one."""
    fields = {f"K={key_heads} {name}": each for name, each in fields_of(key_heads).items()}
    return arms.language_models(folder / f"K={key_heads}", fields)


def key_head_vits(folder: Path) -> Group:
    """Return the ViTs with two key heads, to train in `folder`, as a `Group` to compare with the plain one."""
    compositions = fields_of(IMAGE_KEY_HEADS)

    def run(name: str, folder: Path, steps: int) -> Run:
        fields = {"num_heads": arms.MODEL["num_heads"], **compositions[name]}
        return Run(folder, "vit_digits:attention=dcmha", {**of_model(fields), "total_steps": steps}, IMAGE_METRIC)

    return Group(folder / "images", [*compositions], run, timed=IMAGE_STEPS)


def key_heads_plan(folder: Path, steps: int) -> list[Run]:
    """Return the runs of `key_heads`, after measuring the times of a step, which determine some numbers of steps."""
    vits = key_head_vits(folder)
    vits.times()
    language = [run for n in KEY_HEADS for run in key_head_models(folder, n).plan(steps)]
    return [*language, *vits.at_equal_steps(steps_of(steps, IMAGE_STEPS)).values()]


def key_heads_table(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of `key_heads`, with the results of its runs, which must be complete."""
    images = image_columns(folder, seeds, steps)
    rows, statements = [], []
    for n in KEY_HEADS:
        found = arms.compare(key_head_models(folder, n), seeds, steps)
        for name, fields in fields_of(n).items():
            net = arms.language_model({**arms.MODEL, **fields})
            more: dict[str, Cell] = {"cache per token": costs.cache_per_token(net, arms.CONTEXT)}
            more |= images[name] if n == IMAGE_KEY_HEADS else dict.fromkeys(images[name])
            rows.append(arms.row(f"K={n} {name}", found, more))
        for claim in claims_of(n):
            statements.append(f"- {claim.text}: {claim.verdict(found)}")
    vits = (
        f"ViTs of configs/vit_digits.py with {arms.MODEL['num_heads']} heads and {IMAGE_KEY_HEADS} key heads after "
        f"{steps_of(steps, IMAGE_STEPS)} steps: top-1 accuracy on the test split, and differences in percentage points."
    )
    verdicts = "With the differences in bits per byte of paired seeds, at equal steps:\n\n" + "\n".join(statements)
    notes = (arms.about(found, steps, "the plain row of as many key heads"), vits, verdicts)
    return Table(
        "key_heads", "Composition with grouped queries", rows, notes, Chart("config", "bits per byte", "± 95 %")
    )


def image_columns(folder: Path, seeds: Sequence[int], steps: int) -> dict[str, dict[str, Cell]]:
    """Return, by composition, the table cells of the ViTs: time of a step, accuracy and difference to plain."""
    vits = key_head_vits(folder)
    found, times = arms.measure(vits.at_equal_steps(steps_of(steps, IMAGE_STEPS)), seeds, scale=100), vits.times().ms
    return {
        name: {"ViT step ms": times[name], **{f"ViT {key}": cell for key, cell in found.cells(name, "top-1 %").items()}}
        for name in found.means
    }


def claims_of(key_heads: int) -> list[Claim]:
    """Return the statements to decide about the language models with `key_heads` key heads."""
    folded = QUERY_WISE if key_heads == 1 else FOLDED
    statements = (
        ("composition inside key heads improves plain attention", folded, PLAIN),
        ("complete composition improves plain attention", COMPLETE, PLAIN),
        ("complete composition is better than composition inside key heads", COMPLETE, folded),
    )
    return [
        Claim(
            f"with {key_heads} of {arms.MODEL['num_heads']} key heads, {text}",
            f"K={key_heads} {better}", f"K={key_heads} {worse}",
        )
        for text, better, worse in statements
    ]  # fmt: skip
