"""Commands never unpickle, start a process or access a network once all libraries are imported."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from markdown_pages import ROOT
from trained_workdirs import DIGITS, TEXT

# Runs in a process of its own under Python's audit hook, with the folder of the workdirs `vit` and `lm`, and prints
# [phase, event, callers] for each recorded event. Events are recorded only from Python code; code in C++ raises none.
DRIVER = """
import importlib, json, pickle, pkgutil, socket, subprocess, sys, traceback
from pathlib import Path
import dcvit, input_pipeline
import numpy as np

EVENTS = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
          "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "urllib.Request")
# Modules that start a command, or need a library of an extra when they are imported.
EXCLUDED = ("dcvit.__main__", "dcvit.lm_eval", "dcvit.inference.harness", "dcvit.weights.modeling_dcvit")
folder, data, overrides = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
phase, recorded, busy = None, [], False

def record(event, arguments):
    global busy
    local = event.startswith("socket") and getattr(next(iter(arguments), None), "family", None) == socket.AF_UNIX
    if event in EVENTS and phase and not busy and not local:
        busy = True  # extract_stack may read source files
        recorded.append([phase, event, [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[-8:-1]]])
        busy = False

def call(*words):
    assert cli.run(dispatch, [str(word) for word in words]) == 0, words

def train(config, workdir, *options):
    words = [f"--config.{key}={value}" for key, value in overrides[config].items()]
    call("train", "--config", config, "--workdir", folder / workdir, *words, *options)

for package in (dcvit, input_pipeline):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name not in EXCLUDED:
            importlib.import_module(module.name)
for name in ("clu.parameter_overview", "tensorboard.compat.proto.event_pb2", "google_crc32c", "numba"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
from dcvit import cli
from dcvit.__main__ import dispatch
from dcvit.hub.source import find

sys.addaudithook(record)
phase = "control"
pickle.loads(pickle.dumps(dcvit.errors.ConfigError))
subprocess.run([sys.executable, "-c", ""], check=True)
socket.getaddrinfo("localhost", 80)
phase = "images"
call("evaluate", "--workdir", folder / "vit", "--report", folder / "report.html")
call("predict", "--workdir", folder / "vit", data / "seven.png", data)
call("compare", folder / "vit", "--out", folder / "curves.png")
call("explore", "--workdir", folder / "vit", data / "seven.png", "--out", folder / "page.html")
phase = "text"
call("generate", "--workdir", folder / "lm", "--prompt", "def", "--tokens", 3)
phase = "training"
train("vit_digits", "vit", "--config.total_steps=62", "--config.tensorboard=True", "--accept=total_steps")
train("lm_stdlib", "lm", "--config.total_steps=7", "--accept=total_steps")
phase = "weights"
weights = folder / "weights.npz"
np.savez(weights, **{name: t.read() for name, t in find(folder / "vit").params.items()})
call("evaluate", "--workdir", folder / "vit", "--checkpoint", weights)
train("vit_digits", "more", f"--config.model_init={weights}", "--config.total_steps=1", "--config.ckpt_steps=1")
print("recorded:", json.dumps(recorded))
"""
# Numba unpickles its own machine code from the folder of the package, or the user's cache folder.
OF_LIBRARIES = "numba/core/caching.py"


@pytest.mark.weekly
def test_commands_cause_no_such_event_after_all_imports(tmp_path, digits_workdir, lm_workdir):
    shutil.copytree(digits_workdir, tmp_path / "vit")
    shutil.copytree(lm_workdir, tmp_path / "lm")
    env = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "matplotlib"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8"}  # as in conftest.py, to share compiled programs
    # matplotlib runs fc-list at its first start, to look for the system's fonts, and saves the result.
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], env=env, check=True, capture_output=True)
    words = [tmp_path, ROOT / "tests" / "data", json.dumps({"vit_digits": DIGITS, "lm_stdlib": TEXT})]
    done = subprocess.run([sys.executable, "-c", DRIVER, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    recorded = json.loads(done.stdout.rpartition("recorded: ")[2])
    control = {event for phase, event, _ in recorded if phase == "control"}
    assert control >= {"pickle.find_class", "subprocess.Popen", "socket.getaddrinfo"}
    events = [event for event in recorded if event[0] != "control"]
    assert [event for event in events if not any(OF_LIBRARIES in line for line in event[2])] == []
