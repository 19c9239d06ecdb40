"""`scripts/slurm.sbatch` with stand-ins for srun and scontrol."""

import shutil
import signal
import subprocess

import pytest
from stand_ins import RUN, SCRIPTS, TIMEOUT, parsed, program, wait_for

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
    program(sandbox.path / "scontrol", 'echo "$*" >>"$SANDBOX/scontrol"; [ ! -e "$SANDBOX/refuses" ]', "/bin/bash")
    (sandbox.checkout / ".venv" / "bin").mkdir(parents=True)
    program(sandbox.checkout / ".venv" / "bin" / "python", "", "/bin/bash")
    sandbox.set(code="0")
    sandbox.job = {**JOB, "SLURM_SUBMIT_DIR": str(sandbox.checkout)}
    return sandbox


def step(checkout, *words, cpus=()):
    python = f"{checkout}/.venv/bin/python"
    srun = ["srun", "--kill-on-bad-exit=1", "--gpu-bind=none", "--label", *cpus]
    return [*srun, python, "-u", "-m", "dcvit.train", *RUN, *words]


def test_dry_run_prints_the_command(sandbox):
    awkward = """--config.pp=decode|keep("a b", 'c')"""
    status, out, err = sandbox.run("slurm.sbatch", "--dry-run", *RUN, awkward)
    assert (status, err) == (0, "")
    assert parsed(out) == [step(sandbox.checkout, awkward)]
    assert not (sandbox.folder / "srun").exists()


def test_copy_of_the_script_runs_in_the_folder_of_submission(cluster, tmp_path):
    """Slurm runs a copy of the script with stdin closed."""
    copy = tmp_path / "slurm_script"
    shutil.copy(SCRIPTS / "slurm.sbatch", copy)
    done = subprocess.run(
        ["bash", copy, *RUN, "--", "--config.seed=1"], env=cluster.env | cluster.job, cwd=tmp_path,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = ["srun", *(cluster.folder / "srun").read_text().split("\0")[:-1]]
    assert words == step(cluster.checkout, "--config.seed=1", cpus=["--cpus-per-task=6"])
    assert f"step at {cluster.checkout}" in done.stdout
    assert not (cluster.folder / "scontrol").exists()


def test_failed_job_returns_its_status_and_is_not_requeued(cluster):
    cluster.set(code="9")
    assert cluster.run("slurm.sbatch", *RUN, **cluster.job)[0] == 9
    assert not (cluster.folder / "scontrol").exists()


@pytest.mark.parametrize("refused", [False, True])
def test_job_near_its_time_limit_is_requeued_once(cluster, refused):
    """The script ends together with its step and returns the status of the step, even if requeueing is refused."""
    cluster.set(code="9", long="", **({"refuses": ""} if refused else {}))
    job = cluster.start("slurm.sbatch", *RUN, **cluster.job)
    wait_for((cluster.folder / "srun").exists)
    job.send_signal(signal.SIGUSR1)
    wait_for((cluster.folder / "scontrol").exists)
    assert job.poll() is None
    cluster.set(go="")
    out, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 9
    assert (cluster.folder / "scontrol").read_text() == "requeue 7\n"
    assert ("refused" in out) == refused


def test_options_of_the_job_are_complete_and_come_first():
    lines = (SCRIPTS / "slurm.sbatch").read_text().splitlines()
    given = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=B:USR1@120", "--open-mode=append", "--output=dcvit-%j.log"} <= set(given)
    values = dict(option.split("=", 1) for option in given if "=" in option)
    assert values["--gpus-per-node"] == values["--ntasks-per-node"]
    code = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[code:]), (
        "sbatch ignores options after the first command"
    )


@pytest.mark.parametrize(
    ("words", "job", "message"),
    [
        (["--workdir", "w"], {}, "--config and --workdir are required"),
        (["--config"], {}, "--config needs a value"),
        (["--config", "c", "--workdir", "s3://b/w"], {}, "--workdir s3://b/w: expected a folder"),
        (RUN, {"SLURM_JOB_ID": ""}, "not in a Slurm job"),
        (RUN, {"DCVIT_VENV": "/nowhere"}, "no /nowhere/bin/python"),
        (RUN, {"SLURM_GPUS_ON_NODE": "8"}, "8 GPUs per node but 4 tasks"),
        (RUN, {"SLURM_GPUS_ON_NODE": ""}, "no GPUs per node but 4 tasks"),
    ],
)
def test_bad_options_are_one_line(cluster, words, job, message):
    status, out, err = cluster.run("slurm.sbatch", *words, **{**cluster.job, **job})
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: {message}")
    assert not (cluster.folder / "srun").exists()
