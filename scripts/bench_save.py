"""Benchmark of saving: blocks of ten steps that start with a save, and blocks without, in one run.

    python scripts/bench_save.py --model dcvit_s16

The time of a block with a save includes the copy of the state, ten steps during which the copy is written and its
checksums are computed, and the remaining wait at the end. `dcvit_s16` and `vit_s16` have the shapes of ViT-S/16, images
of 224×224 pixels and a batch of 8. `lm` and `digits` are the DC models of the demos. Prints medians, ranges and the
ratio of the medians.
"""

import argparse
import contextlib
import io
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import jax

from dcvit.config import load as configs
from dcvit.parallel import runtime
from dcvit.training import trainer
from dcvit.training.hooks import CheckpointHook, StepResult
from dcvit.training.setup import make_setup

BLOCK = 10  # steps
PP = "resize_pillow(224)|value_range(-1, 1)|onehot(10)|keep('image', 'labels')"
S16 = {
    "model.width": 384, "model.depth": 12, "model.mlp_dim": 1536, "model.num_heads": 6, "model.patch_size": (16, 16),
    "input.batch_size": 8, "input.pp": PP, "pp_predict": "",
}  # fmt: skip
MODELS = {
    "dcvit_s16": ("vit_digits", S16),
    "vit_s16": ("vit_digits:attention=mha", S16),
    "lm": ("lm_stdlib", {}),
    "digits": ("vit_digits", {}),
}


class TimedCheckpointHook(CheckpointHook):
    """Times blocks of steps; every other block starts with a save."""

    blocks: ClassVar[dict[bool, list[float]]] = {True: [], False: []}  # seconds, by whether the block saves
    block_start = 0.0

    def after_step(self, result: StepResult) -> None:
        """End a block after `BLOCK` steps and start the next one."""
        if result.step % BLOCK:
            return
        jax.block_until_ready(result.state)
        self.run.checkpointer.wait()
        now, number = time.perf_counter(), result.step // BLOCK
        if number > 2:  # the first block compiles
            self.blocks[number % 2 == 0].append(now - self.block_start)
        self.block_start = time.perf_counter()
        if number % 2 == 1:
            self.save(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dcvit_s16")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each kind")
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    name, options = MODELS[args.model]
    steps = BLOCK * (2 * args.rounds + 2)
    words = {"total_steps": steps, "tensorboard": False, "evals": {}, "ckpt_keep": 1, **options}
    config = configs.load(name, [f"{key}={value}" for key, value in words.items()])
    trainer.CheckpointHook = TimedCheckpointHook  # type: ignore[misc]
    with tempfile.TemporaryDirectory(prefix="dcvit-save-") as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer.train(make_setup(config), Path(folder))
        saved = max(Path(folder).glob("checkpoints/*"), key=lambda path: path.stat().st_mtime)
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    rows = {
        "with a save": TimedCheckpointHook.blocks[True],
        "without": TimedCheckpointHook.blocks[False],
    }
    machine = f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}, {platform.machine()}"
    print(
        f"{args.model}: blocks of {BLOCK} steps, a checkpoint of {size / 1e6:.1f} MB, {machine}, jax {jax.__version__}"
    )
    for kind, seconds in rows.items():
        low, middle, high = (f"{f(seconds):.3f}" for f in (min, statistics.median, max))
        print(f"{kind:12} {middle} s ({low}-{high}), {len(seconds)} blocks")
    ratio = statistics.median(rows["with a save"]) / statistics.median(rows["without"])
    print(f"ratio of the medians {ratio:.3f}")


if __name__ == "__main__":
    main()
