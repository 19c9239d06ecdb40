"""`scripts/launch/slurm.sbatch` with stand-ins for srun and scontrol."""

import shutil
import signal
from pathlib import Path

import pytest
from stand_ins import RUN, SCRIPTS, TIMEOUT, program, wait_for

JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "6"}
SRUN = """
printf '%s\\0' "$@" >"$SANDBOX/srun"
echo "step at $PWD"
if [ -e "$SANDBOX/long" ]; then until [ -e "$SANDBOX/go" ]; do sleep 0.02; done; fi
exit "$(cat "$SANDBOX/code")"
"""


@pytest.fixture
def cluster(sandbox):
    """The sandbox with srun, scontrol and a virtual environment, and Slurm's variables for a job of 4 GPUs."""
    program(sandbox.path / "srun", SRUN, "/bin/bash")
    program(sandbox.path / "scontrol", 'echo "$*" >>"$SANDBOX/scontrol"', "/bin/bash")
    (sandbox.checkout / ".venv" / "bin").mkdir(parents=True)
    program(sandbox.checkout / ".venv" / "bin" / "python", "", "/bin/bash")
    sandbox.set(code="9")
    sandbox.job = {**JOB, "SLURM_SUBMIT_DIR": str(sandbox.checkout)}
    return sandbox


def test_job_near_its_time_limit_is_requeued_once_and_ends_with_the_status_of_its_step(cluster, tmp_path):
    """Slurm runs a copy of the script with stdin closed."""
    copy = Path(shutil.copy(SCRIPTS / "launch" / "slurm.sbatch", tmp_path / "slurm_script"))
    cluster.set(long="")
    job = cluster.start(copy, *RUN, "--", "--config.seed=1", **cluster.job)
    wait_for((cluster.folder / "srun").exists)
    job.send_signal(signal.SIGUSR1)
    wait_for((cluster.folder / "scontrol").exists)
    assert job.poll() is None
    cluster.set(go="")
    out, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 9, err
    assert (cluster.folder / "scontrol").read_text() == "requeue 7\n"
    words = (cluster.folder / "srun").read_text().split("\0")[:-1]
    assert words[-len(RUN) - 3 :] == ["-m", "dcvit.train", *RUN, "--config.seed=1"]
    assert f"step at {cluster.checkout}" in out


@pytest.mark.parametrize(
    ("words", "job"),
    [
        (["--workdir", "w"], {}), (RUN, {"SLURM_GPUS_ON_NODE": "8"}),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(cluster, words, job):
    status, out, err = cluster.run("launch/slurm.sbatch", *words, **{**cluster.job, **job})
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert not (cluster.folder / "srun").exists()
