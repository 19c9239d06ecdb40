"""Input that once made the package fail with an undocumented exception, and a short search for more of it.

`tests/robustness/fuzz.py` searches for longer, and writes its findings to the folder `corpus`.
"""

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
