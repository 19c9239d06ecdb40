"""The modules that config files of big_vision import: their functions, and when they can be imported."""

import importlib
import sys

import pytest

from dcvit.config import big_vision
from dcvit.config import load as configs
from dcvit.errors import ConfigError

SPEC = {"variant": "B/16", "res": (224, int), "lr": 0.1, "runlocal": False, "ckpt": None}


def test_text_is_parsed_by_the_types_of_the_defaults():
    defaults = {"variant": "B/16", "res": 224, "lr": 0.1, "runlocal": False, "ckpt": None}
    for text, expected in (
        ("S/32", {"variant": "S/32"}),
        ("runlocal,res=128", {"runlocal": True, "res": 128}),
        ("runlocal=False,lr=1", {"runlocal": False, "lr": 1.0}),
    ):
        assert big_vision.parse_arg(text, **SPEC).to_dict() == defaults | expected
    with pytest.raises(ValueError, match="invalid literal for int"):
        big_vision.parse_arg("res=x", **SPEC)


def test_modules_can_be_imported_while_a_config_is_loaded_only(tmp_path):
    with big_vision.importable():
        assert importlib.import_module("big_vision.configs.common").parse_arg is big_vision.parse_arg
    assert not [name for name in sys.modules if name.startswith("big_vision")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("big_vision.configs.common")
    for line in ("import big_vision.utils", "from big_vision.configs.common import absent", "raise KeyError('x')"):
        (tmp_path / "broken.py").write_text(f"import big_vision.configs.common\n{line}\n")
        with pytest.raises(ConfigError, match=r"broken\.py: ") as error:
            configs.load(str(tmp_path / "broken.py"))
        assert "\n" not in str(error.value)
        assert not [name for name in sys.modules if name.startswith("big_vision")]
