"""`scripts/tpu/pod.sh` with a stand-in for gcloud."""

import pytest
from stand_ins import RUN, TIMEOUT, git, wait_for

SLICE = ["--name", "pod", "--zone", "us-east5-a", "--project", "p"]
SIZE = ["--type", "v5p-16", "--version", "v2-alpha-tpuv5"]


@pytest.mark.slow
@pytest.mark.parametrize("queued", [[], pytest.param(["--queued"], marks=pytest.mark.exhaustive)])
def test_preempted_run_restarts_with_the_same_commit_until_it_fails(sandbox, queued):
    """The script waits if there is no capacity at first."""
    sandbox.set(plan="preempted 3", no_capacity="")
    assert sandbox.pod("create", *SLICE, *SIZE, *queued)[0] != 0, "a refused first request must end the command"
    kind = "queued-resources" if queued else "tpu-vm"
    running = sandbox.start("tpu/pod.sh", "run", *SLICE, *SIZE, *queued, *RUN)
    wait_for(sandbox.trainings)
    sandbox.set(no_capacity="")
    (sandbox.checkout / "scripts" / "later").touch()
    git(sandbox.checkout, "add", ".")
    git(sandbox.checkout, "commit", "-qm", "later")
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 3, err
    assert "training 2 on worker 0" in out
    verbs = [f"{kind} {verb}" for verb in ("create", "create", "delete", "create", "create")]
    assert sandbox.verbs == verbs
    wait_for(lambda: len(sandbox.trainings(1)) == 2)
    for words in (*sandbox.trainings(0), *sandbox.trainings(1)):
        assert words[-len(RUN) :] == RUN
    assert not (sandbox.folder / "home0" / "dcvit" / "scripts" / "later").exists()
    assert sandbox.pod("delete", *SLICE)[0] == 0
    assert sandbox.verbs == [*verbs, f"{kind} delete"]


@pytest.mark.parametrize(
    "words",
    [
        ["frobnicate"], ["start", *SLICE, "--config", "c", "--workdir", "s3://b/w"],
    ],
)  # fmt: skip
def test_bad_options_are_one_line(sandbox, words):
    status, out, err = sandbox.pod(*words)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert sandbox.verbs == []
