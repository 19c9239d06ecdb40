"""`scripts/tpu/pod.sh` with a stand-in for gcloud."""

import pytest
from stand_ins import RUN, TIMEOUT, git, wait_for

SLICE = ["--name", "pod", "--zone", "us-east5-a", "--project", "p"]
SIZE = ["--type", "v5p-16", "--version", "v2-alpha-tpuv5"]


@pytest.mark.slow
@pytest.mark.parametrize("queued", [[], pytest.param(["--queued"], marks=pytest.mark.exhaustive)])
def test_preempted_run_restarts_with_the_same_commit_and_is_deleted(sandbox, queued):
    """The script waits if there is no capacity at first."""
    sandbox.set(plan="preempted 0", no_capacity="")
    assert sandbox.pod("create", *SLICE, *SIZE, *queued)[0] != 0, "a refused first request must end the command"
    kind = "queued-resources" if queued else "tpu-vm"
    running = sandbox.start("tpu/pod.sh", "run", *SLICE, *SIZE, *queued, *RUN)
    wait_for(sandbox.trainings)
    sandbox.set(no_capacity="")
    (sandbox.checkout / "scripts" / "later").touch()
    git(sandbox.checkout, "add", ".")
    git(sandbox.checkout, "commit", "-qm", "later")
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 0, err
    assert "training 2 on worker 0" in out
    verbs = [f"{kind} {verb}" for verb in ("create", "create", "delete", "create", "create")]
    assert sandbox.verbs == verbs
    wait_for(lambda: len(sandbox.trainings(1)) == 2)
    for words in (*sandbox.trainings(0), *sandbox.trainings(1)):
        assert words[-len(RUN) :] == RUN
    assert not (sandbox.folder / "home0" / "dcvit" / "scripts" / "later").exists()
    assert sandbox.pod("delete", *SLICE)[0] == 0
    assert sandbox.verbs == [*verbs, f"{kind} delete"]


@pytest.mark.slow
def test_failed_run_is_not_restarted(sandbox):
    sandbox.set(plan="3")
    assert sandbox.pod("run", *SLICE, *SIZE, *RUN)[0] == 3
    assert len(sandbox.trainings()) == 1
    assert sandbox.verbs == ["tpu-vm create"]


@pytest.mark.exhaustive
def test_active_run_is_followed_and_not_disturbed(sandbox):
    sandbox.set(plan="waits 0")
    first = sandbox.start("tpu/pod.sh", "run", *SLICE, *SIZE, *RUN)
    assert first.stdout.readline() == "training 1 on worker 0: waits\n"
    (sandbox.folder / "home0" / "dcvit" / "mark").touch()
    again = sandbox.start("tpu/pod.sh", "run", *SLICE, *SIZE, *RUN)
    assert again.stdout.readline() == "training 1 on worker 0: waits\n"
    sandbox.set(go="")
    for process in (first, again):
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, err
    assert sandbox.verbs == ["tpu-vm create"]
    assert len(sandbox.trainings(0)) == len(sandbox.trainings(1)) == 1
    assert (sandbox.folder / "home0" / "dcvit" / "mark").exists(), "the code of an active run was replaced"


@pytest.mark.parametrize(
    "words",
    [
        ["frobnicate"], ["run", *SLICE, *SIZE], ["delete", *SLICE, "--force"],
        ["start", *SLICE, "--config", "c", "--workdir", "s3://b/w"],
        ["run", *SLICE, *SIZE, *RUN, "--nfs", "s:/e"],
    ],
)  # fmt: skip
def test_bad_options_are_one_line(sandbox, words):
    status, out, err = sandbox.pod(*words)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert sandbox.verbs == []
