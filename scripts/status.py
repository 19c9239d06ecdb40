"""Table of what has run where: features against CPU, GPU and TPU, from measurements and tests.

    python scripts/status.py [--tests]

"run": `dcvit check-kernels --json` on that device, saved as docs/check_kernels_PLATFORM.json, found an implementation
right; for the CPU, scripts/demo.sh trained the model (docs/evidence.csv), or a test passed; for the GPU,
scripts/bench/train.py ran steps (docs/gpu_training.json). "compiled": the compiler of that platform accepted the
program, by the files of scripts/tpu/compile_kernels.py, `dcvit aot` and the traffic on GPUs. `--tests` runs the tests
first and records which passed in docs/status_tests.json; other calls read that file. The table belongs into the README.
The times of check-kernels are not used.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PASSED = DOCS / "status_tests.json"
PLATFORMS = ("cpu", "gpu", "tpu")
RUN, COMPILED, NOT_RUN = "run", "compiled", "not run"
RIGHT = ("fastest", "passed")  # verdicts of check-kernels
TESTS = "tests/parallel"
# Feature -> the test that runs it on the CPU, or the model that the demo trains; "" where check-kernels decides.
FEATURES = {
    "plain attention": "",
    "composed attention, forward and backward": "",
    "its fused kernels": "",
    "decoding with a KV cache": "",
    "training DCViT": "DCViT",
    "training DCFormer": "DCFormer",
    "several devices (data, FSDP, TP)": f"{TESTS}/test_sharding.py::test_sharding_over_all_axes_trains_like_one_device",
    "several processes": f"{TESTS}/test_multihost.py::test_two_processes_train_and_evaluate_like_one",
}


def read(name: str) -> list:
    """Return the rows of a file in docs; none if it does not exist."""
    path = DOCS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def feature_of(case: str, implementation: str) -> str:
    """Return the feature that a row of check-kernels is about."""
    plain, composed, fused, decoding, *_ = FEATURES
    if case == "decoding":
        return decoding
    if "plain" in case:
        return plain
    return fused if implementation.startswith("pallas") else composed


def has_run(platform: str) -> set[str]:
    """Return the features that have run on a platform."""
    *_, images, text, _, _ = FEATURES
    rows = read(f"check_kernels_{platform}")
    found = {feature_of(row["case"], row["implementation"]) for row in rows if row["verdict"] in RIGHT}
    if platform == "cpu":
        with (DOCS / "evidence.csv").open(newline="", encoding="utf-8") as file:
            trained = [row["arm"] for row in csv.DictReader(file) if row["what"] == "demo"]
        shown = [*read(PASSED.stem), *trained]
        found |= {feature for feature, evidence in FEATURES.items() if evidence in shown}
    if platform == "gpu":
        steps = [row for row in read("gpu_training") if row["row"].startswith("DC")]
        found |= {images if row["model"].startswith("vit") else text for row in steps}
    return found


def compiled(platform: str) -> set[str]:
    """Return the features whose programs the compiler of a platform has accepted."""
    plain, composed, fused, decoding, images, text, devices, _ = FEATURES
    if platform == "gpu":
        rows = [row["row"] for row in read("gpu_traffic") if row["gradient"]]
        return {composed if row.startswith("DC") else plain for row in rows}
    if platform == "cpu":
        return set()
    kernels = [row for row in read("tpu_kernels") if "error" not in row]
    slices = [row for row in read("aot") if row["verdict"] == "fits"]
    found = {decoding if row["queries"] == 1 else fused if row["composed"] else plain for row in kernels}
    if fused in found:
        found.add(composed)
    found |= {images if row["config"].startswith("vit") else text for row in slices}
    return found | {devices for row in slices if row["chips"] > 1}


def lines() -> Iterable[str]:
    """Yield the lines of the table."""
    yield "| | CPU | GPU | TPU |"
    yield "|---|---|---|---|"
    run, built = ({p: function(p) for p in PLATFORMS} for function in (has_run, compiled))
    for feature in FEATURES:
        cells = [RUN if feature in run[p] else COMPILED if feature in built[p] else NOT_RUN for p in PLATFORMS]
        if "kernels" in feature:
            cells[0] = "–"  # there are none for CPUs, where the tests interpret them
        yield f"| {' | '.join([feature, *cells])} |"


def run_tests() -> list[str]:
    """Run the tests of the features; return those that passed."""
    passed = []
    for test in (evidence for evidence in FEATURES.values() if "::" in evidence):
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", test]
        if subprocess.run(command, cwd=ROOT).returncode == 0:
            passed.append(test)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="run the tests that the table needs")
    args = parser.parse_args()
    if args.tests:
        PASSED.write_text(json.dumps(run_tests(), indent=2) + "\n")
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
