"""The tools of `scripts/attack` with few interruptions and mutations, and input that once failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
import fuzz
import fuzz_targets

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = 10
TARGETS = fuzz_targets.targets()
CORPUS = sorted(fuzz.CORPUS.glob("*/*"))


def counts_of(name, *words):
    """Run a tool and return the counts that it prints."""
    process = subprocess.run(
        [sys.executable, ROOT / "scripts" / "attack" / name, *words], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout)


@pytest.mark.weekly
@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_run_has_the_result_of_an_uninterrupted_one(processes):
    kills = 3 - processes  # half a minute passes until the other process notices it
    words = f"--processes {processes} --kills {kills} --terms 1 --interrupts 1 --seed 3".split()
    counts = counts_of("chaos.py", *words)
    assert counts["signals"] == {"SIGKILL": kills, "SIGTERM": 1, "SIGINT": 1}
    assert (counts["most steps lost"]["SIGTERM"], counts["differences"]) == (0, [])


@pytest.mark.weekly
def test_every_mutation_of_a_workdir_is_reported_or_without_effect():
    counts = counts_of("corrupt.py", "--mutations", "24")
    assert counts["kinds"].keys() == {"bit flip", "truncation", "deletion", "swap"}
    assert sum(counts["outcomes"].values()) == 24
    assert counts["outcomes"]["reported"] > 0


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_input_that_once_failed_is_read_or_reported(path):
    if path.parent.name == "tokenizer.json":
        pytest.importorskip("tokenizers")
    fuzz.check(TARGETS[path.parent.name], path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_generated_input_is_read_or_reported(name):
    if name == "tokenizer.json":
        pytest.importorskip("tokenizers")
    assert fuzz.search(TARGETS[name], EXAMPLES, seed=0) == {}


def test_undocumented_exception_is_a_finding_with_the_smallest_input():
    def read(data, folder):
        return 1 / (len(data) // 3 != 1)

    target = fuzz_targets.Target(fuzz_targets.damaged([b"abc", b"abcdefgh"]), read)
    ((message, data),) = fuzz.search(target, 20, seed=0).items()
    assert message.startswith("ZeroDivisionError at test_attack.py:")
    assert 3 <= len(data) < 6
