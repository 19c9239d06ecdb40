"""Commands never unpickle, start a process or access a network once all libraries are imported.

`audit_driver.py` runs them in a process of its own under Python's audit hook.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trained_workdirs import DIGITS, TEXT

pytestmark = pytest.mark.weekly
ROOT = Path(__file__).resolve().parents[2]
PHASES = ["images", "text", "training", "loading weights", "compilation cache"]
# TensorFlow imports h5py, which asks `uname -p` for the processor, and urllib3, which checks if a socket can be bound
# to the local address ::1. Nothing is sent. Numba unpickles its own machine code from the folder of the package, or the
# user's cache folder. Event -> arguments and caller.
KNOWN = {
    "pickle.find_class": ("", "numba/core/caching.py"),
    "subprocess.Popen": ("['uname', '-p']", "h5py/__init__.py"),
    "socket.bind": ("('::1', 0)", "urllib3/util/connection.py"),
}


def audit(folder, phases, workdirs):
    """The recorded events by phase, after "control", "import" and "libraries"."""
    for name, workdir in workdirs.items():
        shutil.copytree(workdir, folder / name)
    for config, overrides in {"vit_digits": DIGITS, "lm_stdlib": TEXT}.items():
        (folder / f"{config}.json").write_text(json.dumps(overrides))
    env = {**os.environ, "MPLCONFIGDIR": str(folder / "matplotlib"), "XDG_CACHE_HOME": str(folder / "cache")}
    env |= {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8"}  # as in conftest.py, to share compiled programs
    # matplotlib runs fc-list at its first start, to look for the system's fonts, and saves the result.
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], env=env, check=True, capture_output=True)
    driver = Path(__file__).with_name("audit_driver.py")
    process = subprocess.run(
        [sys.executable, driver, folder / "events.json", folder, "control", "import", "libraries", *phases],
        env=env, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return json.loads((folder / "events.json").read_text())


@pytest.fixture(scope="module")
def events(tmp_path_factory, digits_workdir, lm_workdir):
    return audit(tmp_path_factory.mktemp("audit"), PHASES, {"vit": digits_workdir, "lm": lm_workdir})


def test_events_of_every_kind_are_recorded(events):
    recorded = {(kind, event) for kind, event, *_ in events["control"]}
    assert {
        ("unpickling", "pickle.find_class"), ("process", "subprocess.Popen"), ("network", "socket.connect"),
        ("network", "socket.getaddrinfo"), ("network", "socket.bind"),
    } <= recorded  # fmt: skip


@pytest.mark.parametrize("kind", ["unpickling", "process", "network"])
def test_commands_cause_no_such_event_after_all_imports(events, kind):
    assert [(phase, event) for phase in PHASES for event in events[phase] if event[0] == kind] == []


def test_importing_the_package_causes_no_event(events):
    assert events["import"] == []


def test_importing_libraries_causes_only_known_events(events):
    for kind, event, arguments, callers in events["libraries"]:
        expected, caller = KNOWN.get(event, ("", "unknown"))
        assert expected in arguments, (kind, event, arguments)
        assert any(caller in line for line in callers), (kind, event, arguments, callers)


def test_demo_causes_no_event(tmp_path):
    assert audit(tmp_path, ["demo"], {})["demo"] == []
