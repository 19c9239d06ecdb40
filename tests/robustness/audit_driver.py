"""Runs commands under Python's audit hook and records unpickling, started processes and network access by phase.

    python audit_driver.py OUT FOLDER PHASE…

OUT receives {phase: [[kind, event, arguments, callers], …]} as JSON. FOLDER holds the workdirs `vit` and `lm`, which
the phases change. Events are recorded only from Python code; code in C++ raises none.
"""

import importlib
import importlib.util
import json
import pkgutil
import socket
import subprocess
import sys
import traceback
from pathlib import Path

EVENTS = {
    "unpickling": ("pickle.find_class",),
    "process": ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
    "network": (
        *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
        *("socket.getnameinfo", "socket.gethostbyname", "socket.gethostbyaddr", "urllib.Request"),
        "http.client.connect",
    ),
}
KINDS = {event: kind for kind, events in EVENTS.items() for event in events}
SOCKET_EVENTS = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")  # local if the socket is a file


class Recorder:
    """An audit hook that records events of `KINDS` in the current phase."""

    def __init__(self):
        self.phase, self.events, self.recording = "", {}, False

    def enter(self, phase):
        self.phase = phase
        self.events[phase] = []
        print(f"== {phase}", flush=True)

    def __call__(self, event, arguments):
        if event not in KINDS or self.recording:
            return
        if event in SOCKET_EVENTS and getattr(arguments[0], "family", None) == socket.AF_UNIX:
            return
        self.recording = True  # extract_stack may read source files
        try:
            callers = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[:-1] if f.filename[0] != "<"]
            self.events[self.phase].append([KINDS[event], event, repr(arguments)[:300], callers])
        finally:
            self.recording = False


def call(*words):
    from dcvit import cli
    from dcvit.__main__ import dispatch

    status = cli.run(dispatch, [str(word) for word in words])
    assert status == 0, (status, words)


def control(folder):
    """Causes events of every kind, to prove that they are recorded."""
    import fractions
    import pickle

    pickle.loads(pickle.dumps(fractions.Fraction(1, 2)))
    subprocess.run([sys.executable, "-c", ""], check=True)
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        client.settimeout(1)
        client.connect_ex(server.getsockname())
    socket.getaddrinfo("localhost", 80)
    for end in socket.socketpair():  # a local socket is not network access
        end.close()


# Modules that start a command, or need a library of an extra when they are imported.
EXCLUDED = ("dcvit.__main__", "dcvit.lm_eval", "dcvit.inference.harness", "dcvit.weights.modeling_dcvit",
            "input_pipeline.images.loops")  # fmt: skip


def import_packages(folder):
    import dcvit
    import input_pipeline

    for package in (dcvit, input_pipeline):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in EXCLUDED:
                importlib.import_module(module.name)


def import_libraries(folder):
    """Import the libraries that commands import on demand, here for TensorBoard and loops over pixels."""
    if importlib.util.find_spec("numba"):
        importlib.import_module("input_pipeline.images.loops")
    if importlib.util.find_spec("clu") and importlib.util.find_spec("tensorboard"):
        importlib.import_module("clu.parameter_overview")
        importlib.import_module("tensorboard.compat.proto.event_pb2")
        importlib.import_module("tensorboard.summary.writer.record_writer")


def images(folder):
    data = Path(__file__).parents[1] / "data"
    call("evaluate", "--workdir", folder / "vit", "--out", folder / "table.csv")
    call("predict", "--workdir", folder / "vit", data / "seven.png", data, "--format", "json")
    call("compare", folder / "vit", "--out", folder / "curves.png")
    call("explore", "--workdir", folder / "vit", data / "seven.png", "--data", "test", "--out", folder / "page.html")


def text(folder):
    call("evaluate", "--workdir", folder / "lm")
    call("generate", "--workdir", folder / "lm", "--prompt", "def", "--tokens", 3)
    call("explore", "--workdir", folder / "lm", "--prompt", "def", "--out", folder / "page.html")
    (folder / "some.txt").write_text("some text")
    call("tokenize", "--data", folder / "some.txt", "--out", folder / "some")


def train(folder, config, workdir, *options):
    """Train with the config of a workdir, except for some options."""
    overrides = json.loads((folder / f"{config}.json").read_text())
    words = [f"--config.{key}={value}" for key, value in overrides.items()]
    call("train", "--config", config, "--workdir", folder / workdir, *words, *options)


def training(folder):
    """Resume both runs, one with TensorBoard."""
    train(folder, "vit_digits", "vit", "--config.total_steps=62", "--config.tensorboard=True", "--accept=total_steps")
    train(folder, "lm_stdlib", "lm", "--config.total_steps=7", "--accept", "total_steps")


def loading_weights(folder):
    import numpy as np

    from dcvit.hub.source import ModelSource, open_parameters

    np.savez(
        folder / "weights.npz", **{name: t.read() for name, t in open_parameters(ModelSource(folder / "vit")).items()}
    )
    call("evaluate", "--workdir", folder / "vit", "--checkpoint", folder / "weights.npz")
    initial = f"--config.model_init={folder / 'weights.npz'}"
    train(folder, "vit_digits", "more", initial, "--config.total_steps=1", "--config.ckpt_steps=1")


def compilation_cache(folder):
    """Evaluate with the default folder for compiled programs, which no environment variable names."""
    import jax

    jax.config.update("jax_compilation_cache_dir", None)
    call("evaluate", "--workdir", folder / "vit")
    assert jax.config.jax_compilation_cache_dir.startswith(str(folder))


def demo(folder):
    """Run the demo in this process instead of in subprocesses."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import demo as script

    script.run = lambda module, *words: call(module.removeprefix("dcvit."), *words)
    sys.argv = ["demo.py", "--steps", "2", "--seeds", "1", "--epochs", "1", "--out", str(folder / "demo")]
    script.main()


PHASES = {
    "control": control,
    "import": import_packages,
    "libraries": import_libraries,
    "images": images,
    "text": text,
    "training": training,
    "loading weights": loading_weights,
    "compilation cache": compilation_cache,
    "demo": demo,
}


def main():
    out, folder, *phases = sys.argv[1:]
    recorder = Recorder()
    sys.addaudithook(recorder)
    for phase in phases:
        recorder.enter(phase)
        PHASES[phase](Path(folder))
    Path(out).write_text(json.dumps(recorder.events))


if __name__ == "__main__":
    main()
