"""A run that lost its last checkpoint is completed with the metrics and parameters of the first time, bit for bit.

tests/robustness/test_chaos.py interrupts runs at random moments.
"""

import shutil

import pytest
from test_distillation import save_teacher
from test_early_stop import OPTIONS
from test_packed_training import RUN
from trained_workdirs import TEXT
from training_runs import digits_command, interrupted_before, lm_command, same_runs

from dcvit.runs.steps import saved_steps

pytestmark = pytest.mark.usefixtures("library_promotion")
MUON = {
    "optax_name": "muon", "optax": {"mu_dtype": "bfloat16", "ns_steps": 1}, "evals": {}, "model.depth": 2,
    "model.scan": True, "layer_decay": 0.7, "freeze_layers": 1, "ema_decay": 0.9, "ema_warmup": True,
}  # fmt: skip
CASES = {
    "composed text": lambda workdir: lm_command(workdir, **TEXT),
    "early stop": lambda workdir: digits_command(workdir, **OPTIONS | {"ckpt_steps": 2}),
    "packed images": lambda workdir: digits_command(workdir, base=RUN),
    "Muon, frozen and scanned layers, average, teacher": lambda workdir: digits_command(
        workdir, **MUON, **{"distill.teacher": workdir.parent / "teacher"}
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_run_without_its_last_checkpoint_is_completed_to_the_same_bits(name, tmp_path, monkeypatch):
    """tests/training/test_training.py does it for augmented images, and interrupts the run."""
    save_teacher(tmp_path / "teacher")
    assert CASES[name](tmp_path / "run") == 0
    *_, kept, last = saved_steps(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / str(last))
    with interrupted_before(monkeypatch, None) as steps:
        assert CASES[name](tmp_path / "again") == 0
    assert steps == [*range(kept + 1, last + 1)]
    assert same_runs(tmp_path / "run", tmp_path / "again")
