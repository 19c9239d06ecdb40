"""Options, error messages, log output and tables of the commands."""

import json
import logging
import subprocess
import sys

import jax
import pytest

from dcvit import cli, process
from dcvit.__main__ import COMMANDS, dispatch
from dcvit.config import keys
from dcvit.errors import CheckpointError, ConfigError, InputError, MetricsError

HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorflow", "torch", "lm_eval", "matplotlib", "sklearn"}
IMPORTED = """
import contextlib, io, json, sys
from dcvit.__main__ import dispatch
found = {{}}
for words in {commands}:
    with contextlib.suppress(SystemExit, ValueError), contextlib.redirect_stdout(io.StringIO()):
        dispatch(words)
    found[" ".join(words)] = sorted({heavy} & sys.modules.keys())
print(json.dumps(found))
"""


@pytest.mark.slow
def test_help_of_the_commands_does_not_import_jax():
    commands = [["--help"], *([command, "--help"] for command in COMMANDS)]
    code = IMPORTED.format(commands=commands, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {" ".join(words): [] for words in commands}


def test_a_text_that_begins_with_a_dash_is_no_option():
    parser = cli.Parser(prog="dcvit x", description="d", examples=[])
    parser.add_argument("--prompt")
    assert parser.parse(["--prompt", "-Hello, said he"])[0].prompt == "-Hello, said he"
    with pytest.raises(ConfigError, match="unknown option -p"):
        parser.parse(["-p", "Hello"])


@pytest.mark.slow
def test_an_unknown_config_key_is_an_error_before_jax_is_imported():
    options = {
        "train": "--workdir absent", "check-data": "", "check-kernels": "", "aot": "--topology v5e:1x1",
        "evaluate": "--checkpoint digits", "predict": "--checkpoint digits a.png", "generate": "--checkpoint text",
        "lm_eval": "--checkpoint text --tasks piqa",
    }  # fmt: skip
    commands = [
        [command, *words.split(), "--config", "vit_digits", "--config.sede=1"] for command, words in options.items()
    ] + [["predict", "--workdir", "digits", "a.png", "--config.seed=1"], ["generate", "--workdir", "absent"]]
    code = IMPORTED.format(commands=commands, heavy=HEAVY | {"numpy", "PIL"})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {" ".join(words): [] for words in commands}


def test_help_lists_every_config_key_with_type_default_and_meaning(capsys):
    assert cli.run(dispatch, ["help", "config"]) == 0
    out = capsys.readouterr().out
    for key in (*keys.KEYS, *(f"input.{key}" for key in keys.INPUT_KEYS), *keys.DURATIONS):
        assert f"\n{key}" in out
    assert "\nlabel_smoothing: float = 0.0\n    " in out


FULL = "RESOURCE_EXHAUSTED: Out of memory"
SMALLER = "; a smaller batch, model or context needs less memory"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        *((kind("x"), 2, "error: x") for kind in (ConfigError, CheckpointError, InputError, MetricsError)),
        *((kind("x"), 2, "error: x") for kind in (FloatingPointError, OSError)),
        (MemoryError("Unable to allocate 8. TiB"), 2, f"error: Unable to allocate 8. TiB{SMALLER}"),
        (jax.errors.JaxRuntimeError(f"{FULL}: 9 bytes.\nmore"), 2, f"error: {FULL}: 9 bytes{SMALLER}"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_expected_error_is_one_line_and_a_status(error, status, line, capsys):
    def fail(argv):
        raise error

    assert cli.run(fail, []) == status
    assert capsys.readouterr() == ("", f"{line}\n")


def test_log_records_of_the_packages_are_plain_lines_on_stderr(capsys):
    def log(argv):
        logging.getLogger("dcvit.anything").info("a line of %s", "dcvit")
        logging.getLogger("input_pipeline.anything").warning("a line of input_pipeline")
        logging.getLogger("dcvit.anything").debug("not printed")
        logging.getLogger("dcvit.dcmha.plan").info("not printed")
        logging.getLogger("another").error("not printed by this handler")
        return 0

    before = [logging.getLogger(name).handlers[:] for name in process.LOGGERS]
    assert cli.run(log, []) == 0
    err = capsys.readouterr().err.replace("not printed by this handler\n", "")
    assert err == "a line of dcvit\na line of input_pipeline\n"
    assert [logging.getLogger(name).handlers for name in process.LOGGERS] == before


def test_messages_are_one_printable_line(capsys):
    text = "of a\nb \x1b[31m \u202e \udcff"

    def fail(argv):
        logging.getLogger("dcvit.anything").warning("a line %s", text)
        raise InputError(text)

    assert cli.run(fail, []) == 2
    line = r"of a\nb \x1b[31m \u202e \udcff"
    assert capsys.readouterr().err == f"a line {line}\nerror: {line}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--numbr=3"], r"unknown option --numbr; did you mean '--number'\?"),
        (["--number", "three"], r"invalid int value: 'three' \(see dcvit test --help\)"),
    ],
)
def test_invalid_options_are_errors(words, message):
    parser = cli.Parser(prog="dcvit test")
    parser.add_argument("--number", type=int)
    with pytest.raises(ConfigError, match=message):
        parser.parse(words)


def test_overrides_are_collected_in_both_spellings():
    parser = cli.Parser("dcvit test")
    parser.add_argument("--number", type=int)
    with pytest.raises(ConfigError, match=r"dcvit test takes no --config.a=1"):
        parser.parse(["--config.a=1"])
    parser.add_argument("--config")
    args, overrides = parser.parse(["--config.a.b=1", "--number", "2", "--config.c", "d", "--config", "x"])
    assert (args.number, overrides) == (2, ["a.b=1", "c=d"])


def test_positional_words_and_options_may_come_in_any_order():
    parser = cli.Parser(prog="dcvit test")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--config")
    parser.add_argument("--number", type=int)
    args, overrides = parser.parse(
        ["a", "--config=x", "--config.x=1", "b", "--number", "2", "c", "--config.y", "3", "d"]
    )
    assert (args.files, args.number, overrides) == (["a", "b", "c", "d"], 2, ["x=1", "y=3"])


ROWS = [{"name": "a", "value": 0.5}, {"name": "[red]b", "value": None}]


@pytest.mark.slow
def test_rows_are_printed_in_every_format(capsys, monkeypatch):
    cli.show(ROWS, "json")
    assert json.loads(capsys.readouterr().out) == ROWS
    cli.show(ROWS, "csv")
    assert capsys.readouterr().out == "name,value\na,0.5\n[red]b,\n"
    for form, empty in (("json", "[]\n"), ("csv", "")):
        cli.show([], form)
        assert capsys.readouterr().out == empty
    cli.show(ROWS, "table", title="title")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("title")
    assert any("[red]b" in line and "–" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (0.97222, "0.9722"), (2.15432, "2.1543"), (83.0, "83"), (23.4567, "23.46"), (1340.7, "1341"),
     (123456.7, "123457"), (0.00012, "0.00012"), (4.1234e-6, "4.123e-06")],
)  # fmt: skip
def test_printed_results_have_four_significant_digits(value, text):
    assert process.number(value) == text
