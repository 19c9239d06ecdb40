"""`scripts/tpu/pod.sh` with a stand-in for gcloud: its commands, its states, and the workers' part of it."""

import os
import re
import signal
import subprocess

import pytest
from stand_ins import RUN, SETUP, TIMEOUT, git, parsed, wait_for

SLICE = ["--name", "pod", "--zone", "us-east5-a", "--project", "p"]
SIZE = ["--type", "v5p-16", "--version", "v2-alpha-tpuv5"]
WHERE = ["--zone=us-east5-a", "--project=p", "--quiet"]
QUERIES = [
    ["queued-resources", "list", "--filter=name~/pod$", "--format=value(state.state)", *WHERE],
    ["tpu-vm", "list", "--filter=name~/pod$", "--format=value(state)", *WHERE],
]
CREATE = ["tpu-vm", "create", "pod", "--accelerator-type=v5p-16", "--version=v2-alpha-tpuv5"]
QUEUE = [
    *["queued-resources", "create", "pod", "--accelerator-type=v5p-16"],
    *["--runtime-version=v2-alpha-tpuv5", "--node-id=pod"],
]
WORKERS = (0, 1)


# Dry runs


def gcloud(*words):
    return ["gcloud", "compute", "tpus", *words, *WHERE]


def ssh(worker, command):
    return gcloud("tpu-vm", "ssh", "pod", f"--worker={worker}", f"--command={command}")


UNPACK = "rm -rf dcvit.new && mkdir dcvit.new && tar -xzf dcvit.tar.gz -C dcvit.new"
ON_WORKER = "bash dcvit/scripts/tpu/pod.sh worker"


def expected(sandbox, command):
    queries = [["gcloud", "compute", "tpus", *words] for words in QUERIES]
    archive = [
        "git",
        "-C",
        str(sandbox.checkout),
        "archive",
        "--format=tar.gz",
        f"--output={sandbox.folder}/dcvit.tar.gz",
        "HEAD",
    ]
    commands = {
        "create": [*queries, gcloud(*CREATE, "--spot")],
        "install": [
            archive,
            gcloud("tpu-vm", "scp", f"{sandbox.folder}/dcvit.tar.gz", "pod:dcvit.tar.gz", "--worker=all"),
            ssh("all", f"{UNPACK} && bash dcvit.new/scripts/tpu/pod.sh worker install 10.0.0.2:/share"),
        ],
        "start": [ssh("all", f"{ON_WORKER} start --config configs/c.py:size=2 --workdir /mnt/dcvit/w")],
        "follow": [ssh(0, f"{ON_WORKER} follow"), ssh(0, f"{ON_WORKER} status")],
        "delete": [
            queries[0],
            gcloud("queued-resources", "delete", "pod", "--force"),
            queries[1],
            gcloud("tpu-vm", "delete", "pod"),
        ],
    }
    steps = ("create", "install", "start", "follow") if command == "run" else (command,)
    return [words for step in steps for words in commands[step]]


@pytest.mark.parametrize("command", ["create", "install", "start", "follow", "run", "delete"])
def test_dry_run_prints_the_commands_and_runs_none(sandbox, command):
    (sandbox.path / "gcloud").unlink()
    before = git(sandbox.checkout, "status", "--short")
    words = [*SLICE, *SIZE, "--spot", "--nfs", "10.0.0.2:/share", "--config=configs/c.py:size=2"]
    status, out, err = sandbox.pod(command, *words, "--workdir", "/mnt/dcvit/w", "--dry-run")
    assert (status, err) == (0, "")
    assert parsed(out) == expected(sandbox, command)
    assert git(sandbox.checkout, "status", "--short") == before
    assert not (sandbox.folder / "calls").exists()


def test_dry_run_of_a_queued_request(sandbox):
    status, out, _ = sandbox.pod("create", *SLICE, *SIZE, "--queued", "--spot", "--dry-run")
    assert status == 0
    assert parsed(out)[-1] == gcloud(*QUEUE, "--spot")
    assert sandbox.calls == []


@pytest.mark.slow
def test_printed_commands_do_the_same_in_a_shell(sandbox):
    awkward = """--config.pp=decode|keep("a b", 'c')  $HOME `x` \\"""
    command = ["run", *SLICE, *SIZE, *RUN]
    status, out, _ = sandbox.pod(*command, "--dry-run", "--", awkward)
    assert status == 0
    sandbox.set(plan="0")
    pasted = subprocess.run(["bash", "-euc", out], env=sandbox.env, capture_output=True, text=True)
    assert pasted.returncode == 0, pasted.stderr
    wait_for(lambda: sandbox.trainings(1))
    assert sandbox.trainings() == [["-u", "-m", "dcvit.train", *RUN, awkward]]


# States of a slice


@pytest.mark.slow
def test_run_on_a_new_slice(sandbox):
    sandbox.set(plan="0")
    status, _, err = sandbox.pod("run", *SLICE, *SIZE, *RUN, "--", "--config.seed=1")
    assert status == 0, err
    assert sandbox.verbs == ["tpu-vm create"]
    assert sandbox.calls[:3] == [*QUERIES, [*CREATE, *WHERE]]
    for worker in WORKERS:
        wait_for((sandbox.folder / f"home{worker}" / "dcvit-run" / "status").exists)
        (run,) = sandbox.lines(f"runs{worker}")
        assert run == [
            str(sandbox.folder / f"home{worker}" / "dcvit"),
            ["-u", "-m", "dcvit.train", *RUN, "--config.seed=1"],
        ]
        assert (sandbox.folder / f"home{worker}" / "dcvit-run" / "status").read_text() == "0\n"
        assert f"on worker {worker}" in (sandbox.folder / f"home{worker}" / "dcvit-run" / "log").read_text()
    assert (sandbox.folder / "setup").read_text().splitlines() == [f"{i} python3 tpu,data,lm,gcs" for i in WORKERS]
    assert "still exists" in err


@pytest.mark.slow
def test_log_of_worker_0_is_printed_and_the_status_returned(sandbox):
    """Status 75: no run is active."""
    sandbox.set(plan="waits 3")
    assert sandbox.pod("create", *SLICE, *SIZE)[0] == 0
    assert sandbox.pod("install", *SLICE)[0] == 0
    status, _, err = sandbox.pod("follow", *SLICE)
    assert (status, "no run is active" in err) == (75, True)
    assert sandbox.pod("start", *SLICE, *RUN)[0] == 0
    following = sandbox.start("tpu/pod.sh", "follow", *SLICE)
    assert following.stdout.readline() == "training 1 on worker 0: waits\n"
    sandbox.set(go="")
    out, err = following.communicate(timeout=TIMEOUT)
    assert (following.returncode, out) == (0, ""), err
    assert sandbox.pod("start", *SLICE, *RUN)[0] == 0
    assert sandbox.pod("follow", *SLICE)[0] == 3
    assert len(sandbox.trainings()) == 2
    assert "create" in sandbox.calls[2]


@pytest.mark.exhaustive
def test_ready_slice_is_used_and_an_active_run_is_not_disturbed(sandbox):
    sandbox.set(plan="waits 0")
    assert sandbox.pod("create", *SLICE, *SIZE)[0] == 0
    assert sandbox.pod("install", *SLICE)[0] == 0
    for active in (False, True):
        status, _, err = sandbox.pod("start", *SLICE, *RUN)
        assert status == 0
        assert ("a run is active" in err) == active
    (sandbox.folder / "home0" / "dcvit" / "mark").touch()
    again = sandbox.start("tpu/pod.sh", "run", *SLICE, *SIZE, *RUN)
    assert again.stdout.readline() == "training 1 on worker 0: waits\n"
    sandbox.set(go="")
    _, err = again.communicate(timeout=TIMEOUT)
    assert again.returncode == 0, err
    assert sandbox.verbs == ["tpu-vm create"]
    assert len(sandbox.trainings(0)) == len(sandbox.trainings(1)) == 1
    assert (sandbox.folder / "home0" / "dcvit" / "mark").exists(), "the code of an active run was replaced"


@pytest.mark.slow
def test_run_waits_for_a_queued_resource(sandbox):
    sandbox.set(queue="WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    status, _, err = sandbox.pod("create", *SLICE, *SIZE, "--queued", "--spot")
    assert status == 0, err
    assert sandbox.verbs == ["queued-resources create"]
    assert sandbox.calls[2] == [*QUEUE, "--spot", *WHERE]
    states = ["not found", "WAITING_FOR_RESOURCES", "PROVISIONING", "READY"]
    assert err.splitlines() == [f"pod.sh: pod: {state}" for state in states]


@pytest.mark.slow
def test_failed_request_ends_the_command(sandbox):
    sandbox.set(queue="PROVISIONING FAILED")
    status, _, err = sandbox.pod("create", *SLICE, *SIZE, "--queued")
    assert status == 1
    assert err.splitlines()[-1].startswith("error: the request failed")
    sandbox.set(queue="ACTIVE")  # a failed request of an earlier command is deleted
    assert sandbox.pod("create", *SLICE, *SIZE, "--queued")[0] == 0
    assert sandbox.verbs == ["queued-resources create", "queued-resources delete", "queued-resources create"]


def test_run_waits_for_a_slice_that_is_being_created(sandbox):
    sandbox.set(**{"tpu-vm": "CREATING CREATING READY"})
    assert sandbox.pod("create", *SLICE, *SIZE)[0] == 0
    assert sandbox.verbs == []


@pytest.mark.slow
@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
def test_preempted_slice_is_deleted_and_created_again(sandbox, state):
    sandbox.set(**{"tpu-vm": state})
    assert sandbox.pod("create", *SLICE, *SIZE)[0] == 0
    assert sandbox.verbs == ["tpu-vm delete", "tpu-vm create"]


@pytest.mark.slow
@pytest.mark.parametrize("queued", [[], pytest.param(["--queued"], marks=pytest.mark.exhaustive)])
def test_preempted_run_restarts_with_the_same_commit(sandbox, queued):
    """The script waits if there is no capacity at first."""
    sandbox.set(plan="preempted 0", no_capacity="")
    first = git(sandbox.checkout, "rev-parse", "HEAD").strip()
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
    assert "interrupted" in err
    assert "training 2 on worker 0" in out
    assert sandbox.verbs == [f"{kind} {verb}" for verb in ("create", "create", "delete", "create", "create")]
    assert sandbox.trainings(0) == sandbox.trainings(1) == [["-u", "-m", "dcvit.train", *RUN]] * 2
    assert not (sandbox.folder / "home0" / "dcvit" / "scripts" / "later").exists(), first


@pytest.mark.slow
def test_preemption_that_shows_after_the_run_has_ended(sandbox):
    sandbox.set(plan="1 0", preempt_after_status="")
    status, _, err = sandbox.pod("run", *SLICE, *SIZE, *RUN)
    assert status == 0, err
    assert len(sandbox.trainings()) == 2


@pytest.mark.slow
def test_missing_slice_is_created_again(sandbox):
    sandbox.set(plan="waits 0")
    running = sandbox.start("tpu/pod.sh", "run", *SLICE, *SIZE, *RUN)
    wait_for(lambda: sandbox.trainings(0) and sandbox.trainings(1))
    (sandbox.folder / "tpu-vm").unlink()
    sandbox.set(go="")  # the connections to the slice end
    _, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 0, err
    assert len(sandbox.trainings()) == 2
    assert sandbox.verbs == ["tpu-vm create"] * 2


@pytest.mark.slow
def test_run_resumes_after_its_host_was_restarted(sandbox):
    sandbox.set(plan="gone 0")
    status, _, err = sandbox.pod("run", *SLICE, *SIZE, *RUN)
    assert status == 0, err
    assert sandbox.verbs == ["tpu-vm create"]
    assert len(sandbox.trainings()) == 2


@pytest.mark.slow
def test_failed_run_is_not_restarted(sandbox):
    sandbox.set(plan="3")
    status, out, _ = sandbox.pod("run", *SLICE, *SIZE, *RUN)
    assert status == 3
    assert "training 1 on worker 0: 3" in out
    assert len(sandbox.trainings()) == 1
    assert sandbox.verbs == ["tpu-vm create"]


@pytest.mark.slow
def test_failed_installation_ends_the_command(sandbox):
    (sandbox.checkout / "scripts" / "setup.sh").write_text("exit 7")
    git(sandbox.checkout, "commit", "-qam", "broken")
    status, _, _ = sandbox.pod("run", *SLICE, *SIZE, *RUN)
    assert status == 7
    assert not sandbox.trainings()


@pytest.mark.slow
def test_broken_connection_does_not_end_the_run(sandbox):
    sandbox.set(plan="waits")
    running = sandbox.start("tpu/pod.sh", "run", *SLICE, *SIZE, *RUN)
    assert running.stdout.readline() == "training 1 on worker 0: waits\n"
    sandbox.set(deaf="", no_connection="")  # neither `status` nor the query of the slice is answered
    os.kill(int((sandbox.folder / "tail").read_text()), signal.SIGTERM)
    wait_for(lambda: not (sandbox.folder / "no-connection").exists())
    sandbox.set(go="")
    _, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 0, err
    assert "does not answer" in err
    assert len(sandbox.trainings()) == 1


def test_only_committed_changes_are_installed_and_the_export_is_mounted_on_every_worker(sandbox):
    (sandbox.checkout / "scripts" / "setup.sh").write_text(SETUP + "# more\n")
    assert sandbox.pod("create", *SLICE, *SIZE)[0] == 0
    status, _, err = sandbox.pod("install", *SLICE, "--nfs", "10.0.0.2:/share")
    assert status == 0
    commands = (sandbox.folder / "sudo").read_text().splitlines()
    assert commands.count("sudo mount -t nfs 10.0.0.2:/share /mnt/dcvit") == len(WORKERS)
    assert "uncommitted changes are not installed" in err
    assert (sandbox.folder / "home0" / "dcvit" / "scripts" / "setup.sh").read_text() == SETUP


@pytest.mark.slow
def test_delete_deletes_the_request_and_the_slice(sandbox):
    assert sandbox.pod("delete", *SLICE)[0] == 0
    assert sandbox.verbs == []
    assert sandbox.pod("create", *SLICE, *SIZE, "--queued")[0] == 0
    assert sandbox.pod("delete", *SLICE)[0] == 0
    assert sandbox.verbs == ["queued-resources create", "queued-resources delete"]
    assert sandbox.pod("create", *SLICE, *SIZE)[0] == 0
    assert sandbox.pod("delete", *SLICE)[0] == 0
    assert sandbox.verbs[2:] == ["tpu-vm create", "tpu-vm delete"]


def test_delete_fails_without_a_connection(sandbox):
    sandbox.set(no_connection="", **{"tpu-vm": "READY"})
    assert sandbox.pod("delete", *SLICE)[0] != 0
    assert sandbox.verbs == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["frobnicate"], "unknown command frobnicate"),
        (["create", *SLICE], "create needs --type"),
        (["run", *SLICE, *SIZE], "run needs --config"),
        (["start", *SLICE, "--config", "c"], "start needs --workdir"),
        (["delete", "--name", "pod", "--zone", "z"], "delete needs --project"),
        (["delete", "--name"], "--name needs a value"),
        (["delete", "--name", "--zone"], "--name needs a value"),
        (["delete", *SLICE, "--force"], "unknown option --force"),
        (["delete", *SLICE, "pod"], "unknown option pod"),
        (["delete", *SLICE, "--name=A_b"], "--name A_b: expected lowercase letters"),
        (["install", *SLICE, "--nfs", "share"], "--nfs share: expected SERVER:/EXPORT"),
        (["start", *SLICE, "--config", "c", "--workdir", "s3://b/w"], "--workdir s3://b/w: expected a folder"),
        (["run", *SLICE, *SIZE, *RUN, "--nfs", "s:/e"], "--workdir /shared/w: expected a folder below /mnt/dcvit"),
    ],
)
def test_bad_options_are_one_line(sandbox, words, message):
    status, out, err = sandbox.pod(*words)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: {message}")
    assert sandbox.calls == []


@pytest.mark.slow
def test_missing_gcloud_is_one_line(sandbox):
    (sandbox.path / "gcloud").unlink()
    status, out, err = sandbox.pod("follow", *SLICE)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"error: .*gcloud.*\n", err)
