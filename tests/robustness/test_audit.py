"""What training and using a model never does: unpickle, start a process, or speak to a network.

A process of its own listens, with Python's audit hook, to all that happens while it runs the demo, trains, evaluates,
predicts, generates, resumes and loads weights. What C++ does by itself raises no such event.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LIBRARIES = "libraries that are imported where they are used"
DRIVER = '''
"""Runs one phase after the other and writes what each did, as {phase: [[kind, event, arguments, callers], …]}."""

import json
import socket
import sys
import traceback
from pathlib import Path

KINDS = {
    "unpickling": ("pickle.find_class",),
    "process": (
        "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
    ),
    "network": (
        "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.getnameinfo",
        "socket.gethostbyname", "socket.gethostbyaddr", "urllib.Request", "http.client.connect",
    ),
}
KIND = {event: kind for kind, events in KINDS.items() for event in events}
LOCAL = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")  # no network where the socket is a file's
phase, found, listening = "control", {}, False


def listen(event, arguments):
    global listening
    if event not in KIND or listening:
        return
    if event in LOCAL and getattr(arguments[0], "family", None) == socket.AF_UNIX:
        return
    listening = True  # to look at the callers may read their files
    try:
        callers = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[:-1] if f.filename[0] != "<"]
        found[phase].append([KIND[event], event, repr(arguments)[:300], callers])
    finally:
        listening = False


def enter(name):
    global phase
    phase = name
    found[name] = []
    print(f"== {name}", flush=True)


enter("control")
sys.addaudithook(listen)
import fractions
import pickle
import subprocess
import urllib.request

pickle.loads(pickle.dumps(fractions.Fraction(1, 2)))
subprocess.run([sys.executable, "-c", ""], check=True)
with socket.socket() as closed:
    closed.bind(("127.0.0.1", 0))
    with socket.socket() as one:
        one.settimeout(1)
        one.connect_ex(closed.getsockname())
socket.getaddrinfo("localhost", 80)
pair = socket.socketpair()  # files of this process: no network
for end in pair:
    end.close()

enter("import")
import importlib
import pkgutil

import dcvit
import input_pipeline

for package in (dcvit, input_pipeline):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name not in ("dcvit.__main__", "dcvit.lm_eval", "dcvit.inference.harness"):
            importlib.import_module(module.name)

enter("libraries that are imported where they are used")
import importlib.util

if importlib.util.find_spec("clu") and importlib.util.find_spec("tensorflow"):  # for TensorBoard
    from input_pipeline.optional import tensorflow

    tensorflow()
    import clu.metric_writers

enter("demo")
import flax.traverse_util
import jax
import numpy as np

from dcvit import cli
from dcvit.parallel import runtime
from dcvit.__main__ import dispatch
from dcvit.checkpoint import load_params

folder, root = map(Path, sys.argv[1:])


def call(*words):
    status = cli.run(dispatch, [str(word) for word in words])
    assert status == 0, (status, words)


sys.path.insert(0, str(root / "scripts"))
import demo

demo.run = lambda module, *words: call(module.removeprefix("dcvit."), *words)  # here, where it is listened to
sys.argv = ["demo.py", "--epochs", "1", "--out", str(folder / "demo")]
demo.main()

TINY = ("--config.model.width=16", "--config.model.depth=1", "--config.model.mlp_dim=16", "--config.ckpt_steps=1")
VIT = (*TINY, "--config.evals.test.log_steps=2", "--config.ema_decay=0.5")
LM = (*TINY, "--config.model.num_heads=2", "--config.input.batch_size=8", "--config.evals.validation.data.limit=16")

enter("images")
vit, lm = folder / "vit", folder / "lm"
call("train", "--config", "vit_digits", "--workdir", vit, *VIT, "--config.total_steps=2")
call("evaluate", "--workdir", vit, "--out", folder / "table.csv")
call("predict", "--workdir", vit, root / "tests/data/seven.png", root / "tests/data", "--format", "json")
call("plot", vit, "--out", folder / "curves.png")

enter("text")
call("train", "--config", "lm_stdlib:steps=2", "--workdir", lm, *LM)
call("evaluate", "--workdir", lm)
call("generate", "--workdir", lm, "--prompt", "def", "--tokens", 3)
(folder / "some.txt").write_text("some text")
call("tokenize", "--data", folder / "some.txt", "--out", folder / "some")

enter("resuming")
call("train", "--config", "vit_digits", "--workdir", vit, *VIT, "--config.total_steps=4", "--accept", "total_steps")
call("train", "--config", "lm_stdlib:steps=3", "--workdir", lm, *LM, "--accept", "total_steps")

enter("loading weights")
np.savez(folder / "weights.npz", **flax.traverse_util.flatten_dict(jax.device_get(load_params(vit)), sep="/"))
call("evaluate", "--workdir", vit, "--checkpoint", folder / "weights.npz")
start = ("--config.model_init=" + str(folder / "weights.npz"), "--config.total_steps=1")
call("train", "--config", "vit_digits", "--workdir", folder / "more", *VIT, *start)

enter("a cache of compiled programs")
jax.config.update("jax_compilation_cache_dir", None)  # as where nothing says where
runtime.keep_compiled()

(folder / "found.json").write_text(json.dumps(found))
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the driver heard, by phase."""
    folder = tmp_path_factory.mktemp("audit")
    (folder / "driver.py").write_text(DRIVER)
    env = {**os.environ, "MPLCONFIGDIR": str(folder / "matplotlib"), "XDG_CACHE_HOME": str(folder / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # matplotlib looks for the system's fonts at its very first start, with fc-list, and keeps what it found.
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], env=env, check=True, capture_output=True)
    command = [sys.executable, folder / "driver.py", folder, ROOT]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_the_hook_hears_what_it_is_for(found):
    heard = [(kind, event) for kind, event, *_ in found["control"]]
    assert ("unpickling", "pickle.find_class") in heard
    assert ("process", "subprocess.Popen") in heard
    assert {("network", "socket.connect"), ("network", "socket.getaddrinfo"), ("network", "socket.bind")} <= {*heard}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unpickling", "process", "network"])
def test_nothing_of_the_kind_happens_once_all_is_imported(found, kind):
    phases = [phase for phase in found if phase not in ("control", "import", LIBRARIES)]
    assert phases == ["demo", "images", "text", "resuming", "loading weights", "a cache of compiled programs"]
    assert [(phase, event) for phase in phases for event in found[phase] if event[0] == kind] == []


@pytest.mark.slow
def test_importing_the_package_does_none_of_it(found):
    assert found["import"] == []


@pytest.mark.slow
def test_importing_libraries_does_no_more_of_it_than_is_known(found):
    """TensorFlow imports h5py, which asks `uname -p` for the processor, and urllib3, which tries whether a socket can
    have an address of this machine (::1, any port). Nothing is sent, and the program's name comes from Python itself.
    """
    for kind, event, arguments, callers in found[LIBRARIES]:
        known = {
            "subprocess.Popen": ("['uname', '-p']", "h5py/__init__.py"),
            "socket.bind": ("('::1', 0)", "urllib3/util/connection.py"),
        }
        what, where = known.get(event, ("", "unknown"))
        assert what in arguments, (kind, event, arguments)
        assert any(where in caller for caller in callers), (kind, event, arguments, callers)
