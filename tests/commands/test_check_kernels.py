"""`dcvit check-kernels`: the verdicts that it forgets."""

import jax
import pytest

from dcvit import check_kernels, cli
from dcvit.dcmha import verdicts
from dcvit.dcmha.verdicts import Verdict, Verdicts


@pytest.fixture
def store(monkeypatch, tmp_path):
    """Verdicts on two kernels, and a command that verifies nothing."""
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path))
    monkeypatch.setattr(check_kernels, "_of_cases", lambda *args: [])
    store = Verdicts(verdicts.environment(jax.local_devices()[0]))
    for name in ("pallas_gpu", "pallas_tpu"):
        store.write("a case", name, Verdict("failed", reason="it raised"))
    return store


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ([], {"pallas_gpu", "pallas_tpu"}),
        (["vit", "--again"], set()),
    ],
)
def test_again_forgets_the_verdicts_on_all_kernels(words, left, store):
    assert cli.run(check_kernels.main, words) == 0
    assert store.read("a case").keys() == left
