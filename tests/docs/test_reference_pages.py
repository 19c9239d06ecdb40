"""The generated reference names everything that the code offers, with type, default and meaning."""

import dataclasses
import re

import pytest
import reference_pages
from reference_pages import PAGES

from dcvit import __main__ as entry
from dcvit.config import keys, values
from dcvit.models import attention, dcmha, lm, vit


@pytest.fixture(scope="module")
def texts():
    """Every generated page by name."""
    return {name: page() for name, page in PAGES.items()}


def first_cells(text):
    """The code in the first cell of every table row."""
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def test_every_command_and_option_is_listed(texts):
    assert first_cells(texts["commands"]) >= set(entry.COMMANDS)
    for name, parser in reference_pages.parsers().items():
        section = texts["commands"].split(f"## dcvit {name}\n")[1].split("\n## ")[0]
        for action in parser._actions:
            assert {*action.option_strings} <= first_cells(section), (name, action.dest)
            assert action.help, f"dcvit {name}: {action.dest} has no help text"
    assert set(reference_pages.parsers()) == set(entry.COMMANDS)


def test_every_config_key_is_listed_with_a_meaning(texts):
    listed = first_cells(texts["config_keys"])
    assert listed >= {*keys.KEYS, *keys.INPUT_KEYS, *values.known_keys()}
    assert all(key.doc for key in [*keys.KEYS.values(), *keys.INPUT_KEYS.values()])


@pytest.mark.parametrize("cls", [vit.ViT, lm.LM, attention.Attention, dcmha.DCMHA], ids=lambda cls: cls.__name__)
def test_every_model_field_has_a_meaning(cls):
    rows = reference_pages.fields(cls).splitlines()[2:]
    names = {field.name for field in dataclasses.fields(cls)} - {"parent", "name"}
    assert {re.match(r"\| `(\w+)`", row)[1] for row in rows} == names
    assert [row for row in rows if row.endswith("|  |")] == []
