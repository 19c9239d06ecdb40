"""Stand-ins for gcloud and for the workers of a TPU slice, and a checkout with the launchers."""

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOOLS = [
    *["awk", "bash", "cat", "cp", "dirname", "flock", "git", "gzip", "hostname", "mkdir", "mktemp", "mv"],
    *["rm", "setsid", "sleep", "tail", "tar"],
]
RUN = ["--config", "configs/c.py:size=2", "--workdir", "/shared/w"]
TIMEOUT = 600  # seconds after which a test fails; no test waits for time to pass

# The stand-ins start many times, so they import little. They append their arguments to files as Python literals.
COMMON = """
import os, sys
def path(name):
    return os.path.join(os.environ["SANDBOX"], name)
def read(name):
    with open(path(name)) as file:
        return file.read()
def write(name, text, mode="w"):
    with open(path(name), mode) as file:
        file.write(text)
"""

# gcloud for one slice. The files "tpu-vm" and "queued-resources" hold the states that successive queries return; the
# last state stays. A slice has two workers, whose home folders are home0 and home1.
GCLOUD = f"""{COMMON}
words = sys.argv[1:]
write("calls", repr(words) + "\\n", "a")
assert words[:2] == ["compute", "tpus"]
kind, verb, *rest = words[2:]
options = dict(word.split("=", 1) for word in rest if word.startswith("--") and "=" in word)
homes = [path("home0"), path("home1")]
def states_of(kind):
    return read(kind).split() if os.path.exists(path(kind)) else []
def become(kind, states):
    write(kind, "\\n".join(states))
    if kind == "tpu-vm" and states == ["READY"]:
        for home in homes:
            os.makedirs(home, exist_ok=True)
def removed(name):
    if os.path.exists(path(name)):
        os.remove(path(name))
        return True
def run(home, line):
    process = os.fork()
    if process == 0:
        os.closerange(3, 256)
        os.chdir(home)
        os.execvpe("bash", ["bash", "-c", line], {{**os.environ, "HOME": home, "WORKER": home[-1]}})
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
if verb == "list":
    states = states_of(kind)
    if states:
        print(states[0])
        become(kind, states[1:] or states)
        if kind == "queued-resources" and states[0] == "ACTIVE" and not states_of("tpu-vm"):
            become("tpu-vm", ["READY"])
elif verb == "create":
    if removed("no-capacity"):
        sys.exit("ERROR: (gcloud) no capacity")
    become(kind, ["READY"] if kind == "tpu-vm" else ["ACTIVE"])
elif verb == "delete":
    assert states_of(kind), "nothing to delete"
    import shutil
    for gone in {{kind, "tpu-vm"}}:
        removed(gone)
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)
else:
    if states_of("tpu-vm") != ["READY"]:
        sys.exit("ERROR: (gcloud) cannot connect")
    chosen = homes if options["--worker"] == "all" else [homes[int(options["--worker"])]]
    status = 0
    for home in chosen:
        if verb == "scp":
            source, target = (word for word in rest if not word.startswith("--"))
            with open(source, "rb") as file, open(os.path.join(home, target.removeprefix("pod:")), "wb") as copy:
                copy.write(file.read())
        else:  # split and joined by spaces, as gcloud and ssh do
            status = run(home, " ".join(options["--command"].split(" "))) or status
    sys.exit(status)
"""

# Python on a worker: the n-th word of the file "plan" is the outcome of the n-th training run.
TRAINING = f"""{COMMON}
import time
worker = os.environ["WORKER"]
write("runs" + worker, repr([os.getcwd(), sys.argv[1:]]) + "\\n", "a")
attempt = len(read("runs" + worker).splitlines())
plan = read("plan").split()[attempt - 1]
print(f"training {{attempt}} on worker {{worker}}: {{plan}}", flush=True)
if plan == "preempted":
    while worker == "1" and read("tpu-vm") == "READY":
        time.sleep(0.02)
    write("tpu-vm", "PREEMPTED")
    sys.exit(1)
sys.exit(int(plan) if plan.isdigit() else 0)
"""

SETUP = """
mkdir -p "$DCVIT_VENV/bin"
cp "$SANDBOX/training" "$DCVIT_VENV/bin/python"
"""


def program(path, text, interpreter=None):
    path.write_text(f"#!{interpreter or f'{sys.executable} -IS'}\n{text}")
    path.chmod(0o755)


def git(folder, *words):
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


class Sandbox:
    """A checkout with the launchers, a PATH with only stand-ins and the required tools, and a folder for their state.

    No real cloud or cluster can be reached.
    """

    def __init__(self, folder):
        self.folder, self.path, self.checkout = folder / "sandbox", folder / "bin", folder / "checkout"
        for folder in ("tpu", "launch"):
            (self.checkout / "scripts" / folder).mkdir(parents=True)
        self.folder.mkdir()
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool))
        (self.path / "python3").symlink_to(sys.executable)
        program(self.path / "gcloud", GCLOUD)
        program(self.folder / "training", TRAINING)
        for name in ("tpu/pod.sh", "launch/slurm.sbatch"):
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
            "SANDBOX": str(self.folder),
            "TMPDIR": str(self.folder),
            "DCVIT_POLL": "0.05",
        }

    def start(self, script, *words, **env):
        return subprocess.Popen(
            ["bash", self.checkout / "scripts" / script, *words], env={**self.env, **env}, cwd=self.checkout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, script, *words, **env):
        process = self.start(script, *words, **env)
        out, err = process.communicate(timeout=TIMEOUT)
        return process.returncode, out, err

    def pod(self, *words, **env):
        return self.run("tpu/pod.sh", *words, **env)

    def set(self, **files):
        for name, text in files.items():
            (self.folder / name.replace("_", "-")).write_text(text)

    def lines(self, name):
        path = self.folder / name
        return [ast.literal_eval(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def calls(self):
        """The arguments of all calls of gcloud, without "compute tpus"."""
        return [words[2:] for words in self.lines("calls")]

    @property
    def verbs(self):
        """The calls of gcloud that create or delete something."""
        short = [(words[0], words[1]) for words in self.calls]
        return [f"{kind} {verb}" for kind, verb in short if verb in ("create", "delete")]

    def trainings(self, worker=0):
        return [words for _, words in self.lines(f"runs{worker}")]


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
