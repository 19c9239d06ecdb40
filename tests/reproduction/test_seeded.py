"""Results that are stored beside a run are read back, and neither changed ones nor those of another run are."""

import pytest

from dcvit.errors import ConfigError
from dcvit.reproduction.seeded import stored

VALUE = {"validation": {"accuracy": 0.5, "perplexity": 3.25}}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "runs" / "results.json"
    assert stored(path, ["config"], lambda: VALUE) == VALUE
    return path


def fail():
    pytest.fail("computed again")


def test_a_value_is_computed_once_and_that_of_something_else_is_refused(path):
    assert stored(path, ("config",), fail) == VALUE
    with pytest.raises(ConfigError, match=r"results\.json was computed from other configs or another run; remove it"):
        stored(path, ["other"], fail)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("0.5", "0.9"),
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"crc32"', '"crc"'),
        lambda text: "",
        lambda text: "[" * 100_000,
    ],
)
def test_a_changed_file_is_refused(path, change):
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=r"cannot read .*results\.json: .*; remove it to compute it again"):
        stored(path, ["config"], fail)
