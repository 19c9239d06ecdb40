"""Input that once made the package fail with an undocumented exception, and a short search for more of it.

`tests/robustness/fuzz.py` searches for longer, and writes its findings to the folder `corpus`.
"""

import signal

import pytest

pytest.importorskip("hypothesis")
import fuzz

EXAMPLES = 10
TARGETS = fuzz.targets()
CORPUS = sorted(fuzz.CORPUS.glob("*/*"))
SLOW = ("setup", "metrics.jsonl", "task file")  # they compile, draw, or import a large library
EXTRA = {"task file": "lm_eval", "tokenizer.json": "tokenizers"}


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_input_that_once_failed_is_read_or_reported(path):
    pytest.importorskip(EXTRA.get(path.parent.name, "json"))
    fuzz.check(TARGETS[path.parent.name], path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name) for name in TARGETS])
def test_generated_input_is_read_or_reported(name):
    pytest.importorskip(EXTRA.get(name, "json"))
    search = fuzz.Search(TARGETS[name])
    search.explore(max_examples=EXAMPLES, derandomize=True)
    assert search.findings == {}
    assert search.examples >= EXAMPLES


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_undocumented_exception_is_found_and_minimized(error):
    def read(data, folder):
        if b"null" in data:
            raise error("bad")

    search = fuzz.Search(fuzz.Target(TARGETS["accepted.json"].inputs, read))
    search.explore(max_examples=100, derandomize=True)
    ((name, (data, _)),) = search.findings.items()
    assert name.startswith(f"{error.__name__} at test_fuzz_corpus.py:")
    assert b"null" in data
    assert len(data) < 20


@pytest.mark.slow
def test_example_that_takes_too_long_is_found(monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 1)

    def read(data, folder):
        while True:
            pass

    search = fuzz.Search(fuzz.Target(TARGETS["npz"].inputs, read))
    search.explore(max_examples=1, derandomize=True)
    assert list(search.findings) == ["more than 1 s of CPU time"]


def test_signals_of_the_profiler_of_another_library_are_no_excess():
    """libtpu sends SIGPROF to its process at short intervals."""
    before = signal.getsignal(signal.SIGPROF)
    with fuzz.limits():
        assert signal.getsignal(signal.SIGPROF) is before
