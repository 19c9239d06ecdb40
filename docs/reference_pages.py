"""Pages of the reference that are generated from the code: commands, config keys, models, data, ops, evaluators.

`write(folder)` writes one Markdown file for each entry of `PAGES`. `docs/conf.py` calls it before Sphinx reads the
pages. Each page is a function without arguments that returns Markdown, so that tests can check its content without
building the site.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import runpy
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from dcvit import __main__ as entry
from dcvit import cli
from dcvit.config import keys
from dcvit.config.keys import Key
from dcvit.errors import type_name
from dcvit.models import attention, dcmha, lm, presets, vit
from dcvit.training import optim
from input_pipeline.preprocess import ops
from input_pipeline.source import KINDS

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^(Args|Fields|Raises|Returns|Yields)(, .*)?:$")
ENTRY = re.compile(r"^([\w*][^:]*?): (.*)$")


class Docstring(NamedTuple):
    """A Google-style docstring: the text before its sections, and the entries of each section."""

    text: str
    sections: dict[str, list[tuple[str, str]]]  # section name -> (entry's names, text); ("", text) without names


def parse(docstring: str | None) -> Docstring:
    """Split a docstring into its text and its sections."""
    text: list[str] = []
    bodies: dict[str, list[str]] = {}
    current = text
    for line in inspect.cleandoc(docstring or "").splitlines():
        if match := SECTION.match(line):
            current = bodies.setdefault(match[1], [])
        elif current is not text and line and not line.startswith(" "):
            current = text
            text += ["", line]
        else:
            current.append(line)
    whole = re.sub(r"\n{3,}", "\n\n", "\n".join(text))
    return Docstring(whole.strip(), {name: _entries(body) for name, body in bodies.items()})


def _entries(lines: Sequence[str]) -> list[tuple[str, str]]:
    """The entries "names: text" of a section, whose continuation lines are indented further."""
    entries: list[tuple[str, str]] = []
    for line in inspect.cleandoc("\n".join(lines)).splitlines():
        match = ENTRY.match(line)
        if match:
            entries.append((match[1], match[2]))
        elif entries:
            names, text = entries.pop()
            entries.append((names, f"{text} {line.strip()}".strip()))
        else:
            entries.append(("", line.strip()))
    return entries


def markdown(text: str) -> str:
    """Docstring text as Markdown: blocks indented by four spaces or more become literal blocks."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        indented = all(line.startswith("  ") for line in block.splitlines() if line)
        blocks.append(f"```text\n{textwrap.dedent(block)}\n```" if indented else block)
    return "\n\n".join(blocks)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; line breaks in cells become spaces and bars are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in row) + " |" for row in lines
    )


def code(value: object) -> str:
    """A value as inline code."""
    return f"`{value}`"


def signature(function: Callable[..., Any], name: str) -> str:
    """The parameters of a function with their defaults, without annotations: `resize(size, method='area')`."""
    words = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key in ("self", "predict", "mesh"):
            continue
        star = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else ""
        given = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        words.append(f"{star}{key}{given}")
    return f"{name}({', '.join(words)})"


def arguments(function: Callable[..., Any], skip: Sequence[str] = ()) -> str:
    """A table of a function's arguments with default and meaning, from its signature and its docstring."""
    meanings = _by_name(parse(function.__doc__).sections.get("Args", ()), list(inspect.signature(function).parameters))
    rows = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key != "self" and key not in skip:
            default = "required" if parameter.default is inspect.Parameter.empty else code(repr(parameter.default))
            rows.append((code(key), default, meanings.get(key, "")))
    return table(("option", "default", "meaning"), rows) if rows else "This has no options."


def _by_name(entries: Iterable[tuple[str, str]], known: Sequence[str]) -> dict[str, str]:
    """The text of each name; an entry may name several, separated by commas, or a range "first … last"."""
    texts: dict[str, str] = {}
    mentioned: dict[str, str] = {}  # names that only the text of another entry mentions
    for names, text in entries:
        first, ellipsis, last = (word.strip(" `*") for word in names.partition("…"))
        if ellipsis and first in known and last in known:
            listed = known[known.index(first) : known.index(last) + 1]
        else:
            listed = [name.strip(" `*") for name in names.split(",")]
        text = text[:1].upper() + text[1:] if text[:1].isascii() else text
        texts |= {name: text for name in listed if name not in texts}
        mentioned |= {name: f"See {code(listed[0])}." for name in known if code(name) in text}
    return {name: meaning for name, meaning in mentioned.items() if name not in texts} | texts


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The argument parser of each command, taken at the moment when the command parses its arguments."""

    class Found(Exception):  # noqa: N818 - carries the parser out of the command, is no error
        pass

    def stop(parser: argparse.ArgumentParser, argv: object) -> None:
        raise Found(parser)

    found = {}
    for name in entry.COMMANDS:
        with mock.patch.object(cli.Parser, "parse", stop):
            try:
                _command(name).main([])
            except Found as e:
                found[name] = e.args[0]
    return found


def _command(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"dcvit.{name.replace('-', '_')}")


def commands() -> str:
    """The commands and all their options, from the argument parsers."""
    parts = [
        "# Commands",
        "`dcvit COMMAND` is the same as `python -m dcvit.COMMAND`. Commands that read a config accept "
        "`--config.KEY=VALUE` for every key of [the config](config_keys.md).",
        table(("command", "purpose"), [(code(name), text) for name, text in entry.COMMANDS.items()]),
    ]
    for name, parser in parsers().items():
        rows = []
        for action in parser._actions:
            default = action.default
            shown = "" if default in (None, argparse.SUPPRESS, [], False) else code(default)
            meaning = (action.help or "") % vars(action)
            if action.choices:
                meaning = f"{meaning}{': ' if meaning else ''}{', '.join(map(code, action.choices))}"
            word = ", ".join(map(code, action.option_strings)) or code(action.dest)
            rows.append((word, "required" if action.required else shown, meaning))
        module = parse(_command(name).__doc__)
        parts += [f"## dcvit {name}", markdown(module.text), table(("option", "default", "meaning"), rows)]
    return "\n\n".join(parts)


def config_keys() -> str:
    """The keys of a config with type, default and meaning, and the keys that give durations."""
    units = ", ".join(code(f"X_{unit}") for unit in keys.UNITS)
    durations = [
        (", ".join(code(f"{name}_{unit}") for unit in keys.UNITS), text) for name, text in keys.DURATIONS.items()
    ]
    return "\n\n".join(
        [
            "# Config keys",
            "A config is a Python file with a function `get_config` that returns a `ConfigDict` of these keys. An "
            "unknown key or a value of the wrong type is an error before anything is compiled, and the message "
            "suggests the nearest key. `--config.KEY=VALUE` sets a key on the command line, and "
            "`--config.model.rank=1` sets a key inside a dict.",
            _keys(keys.KEYS),
            "## Durations",
            f"A duration is given in one of four units: {units}. A percentage is relative to the length of the run.",
            table(("keys", "meaning"), durations),
            "## Keys of input",
            _keys(keys.INPUT_KEYS),
            "[Data kinds](data_kinds.md) lists the options of `data`, and [preprocessing ops](preprocessing.md) those "
            "of `pp`.",
            "## Keys of schedule",
            markdown(parse(optim.schedule.__doc__).text),
            arguments(optim.schedule, skip=("total_steps",)),
        ]
    )


def _keys(keys: Mapping[str, Key]) -> str:
    """A table of config keys."""
    rows = [(code(name), type_name(key.type), code(repr(key.default)), key.doc) for name, key in keys.items()]
    return table(("key", "type", "default", "meaning"), rows)


def shipped_configs() -> str:
    """The configs of the package with the arguments of their `get_config`."""
    parts = [
        "# Shipped configs",
        "Each config is a file in `configs/`. Arguments follow its name: "
        "`--config vit_i1k:variant=ViT-S/16,epochs=300`.",
    ]
    for path in sorted((ROOT / "configs").glob("*.py")):
        names = runpy.run_path(str(path))
        parameters = inspect.signature(names["get_config"]).parameters.values()
        rows = [(code(parameter.name), code(repr(parameter.default))) for parameter in parameters]
        parts += [
            f"## {path.stem}",
            f"```text\n{inspect.cleandoc(names['__doc__'] or '')}\n```",
            table(("argument", "default"), rows),
        ]
    return "\n\n".join(parts)


def fields(cls: type) -> str:
    """A table of the fields of a flax module with type, default and meaning, from its docstring."""
    own = [field for field in dataclasses.fields(cls) if field.name not in ("parent", "name")]
    own.sort(key=lambda field: field.name not in cls.__annotations__)  # inherited fields come last
    documented = [entry for base in cls.__mro__ for entry in parse(base.__doc__).sections.get("Fields", ())]
    meanings = _by_name(documented, [field.name for field in own])
    rows = []
    for field in own:
        default = "required" if field.default is dataclasses.MISSING else code(_default(field.default))
        hint = field.type if isinstance(field.type, str) else type_name(field.type)
        rows.append((code(field.name), code(hint), default, meanings.get(field.name, "")))
    return table(("field", "type", "default", "meaning"), rows)


def _default(value: object) -> str:
    """A default value; functions are shown by their name."""
    return getattr(value, "__qualname__", "").split(".")[0] or repr(value)


def models() -> str:
    """Fields of the models and of the attention module, variants of the ViT and presets of the language model."""
    names = sorted({name for preset in presets.PRESETS.values() for name in preset})
    rows = [
        (code(name), *(code(preset[key]) if key in preset else "" for key in names))
        for name, preset in presets.PRESETS.items()
    ]
    return "\n\n".join(
        [
            "# Models",
            "`config.model_name` is `vit` or `lm`. `config.model` holds fields of the model, and optionally `variant` "
            "(ViT) or `preset` (language model), which set several fields at once.",
            "## ViT",
            fields(vit.ViT),
            "## ViT variants",
            "A variant is written `ViT-S/16` or `DCViT-S/16`: size and patch size in pixels. `DCViT` sets "
            "`compose='both'`.",
            table(
                ("variant", "width", "depth", "MLP width", "heads"),
                [(code(name), *map(str, shape)) for name, shape in vit.VARIANTS.items()],
            ),
            "## LM",
            fields(lm.LM),
            "## LM presets",
            "A preset sets the fields in its row. An empty cell leaves the default of the field.",
            table(("preset", *map(code, names)), rows),
            "## Attention",
            fields(attention.Attention),
            "## DCMHA",
            "The interface of `nn.MultiHeadDotProductAttention`; see [the tutorial](../../own_model.md).",
            fields(dcmha.DCMHA),
        ]
    )


def preprocessing() -> str:
    """The preprocessing ops."""
    parts = [
        "# Preprocessing ops",
        "A preprocessing string is a chain `op|op(arguments)|…`. It is parsed and never evaluated; arguments are "
        "literals. Every random choice is drawn from a generator that is a function of seed, epoch and example. "
        "Ops that big_vision also has produce the same pixels from the same arguments. Ops on an image also take "
        "`inkey` and `outkey`, or `key` for both: the keys of the value that they read and of the result.",
    ]
    for name in ops.__all__:
        function = getattr(ops, name)
        parts += [f"## {name}", f"```python\n{signature(function, name)}\n```", markdown(parse(function.__doc__).text)]
    return "\n\n".join(parts)


def data_kinds() -> str:
    """The kinds of data and their options."""
    parts = [
        "# Data kinds",
        "`config.input.data` and the `data` of an evaluator name a kind of data and its options, for example "
        '`{"kind": "folder", "data_dir": "pets", "split": "train"}`. Every kind also takes `part`, `limit` and '
        "`cache`.",
        table(("option", "default", "meaning"), _rows_of("part", "limit", "cache")),
    ]
    for kind, module in KINDS.items():
        source = importlib.import_module(module).Source
        parts += [f"## {kind}", markdown(parse(source.__doc__).text), arguments(source.__init__)]
        if more := parse(source.__init__.__doc__).text:
            parts.append(markdown(more))
    return "\n\n".join(parts)


def _rows_of(*names: str) -> list[tuple[str, str, str]]:
    """Rows for options of `open_source` itself."""
    from input_pipeline import open_source

    meanings = dict(parse(open_source.__doc__).sections["Args"])
    parameters = inspect.signature(open_source).parameters
    return [(code(name), code(repr(parameters[name].default)), meanings[name]) for name in names]


def evaluators() -> str:
    """The evaluators and their options."""
    parts = [
        "# Evaluators",
        "`config.evals` maps a name to a dict: `type` is one of the headings below, `data`, `pp` and the other options "
        "are those listed, and one of `log_steps`, `log_epochs`, `log_examples` or `log_percent` sets the interval. "
        "`optional=True` skips the evaluator when its data is missing.",
    ]
    for path in sorted((ROOT / "dcvit" / "evaluators").glob("[a-z]*.py")):
        module = importlib.import_module(f"dcvit.evaluators.{path.stem}")
        evaluator = module.Evaluator
        parts += [
            f"## {path.stem}",
            markdown(parse(module.__doc__).text),
            markdown(parse(evaluator.__doc__).text),
            fields(module.Options),
        ]
    return "\n\n".join(parts)


PAGES: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "config_keys": config_keys,
    "shipped_configs": shipped_configs,
    "models": models,
    "preprocessing": preprocessing,
    "data_kinds": data_kinds,
    "evaluators": evaluators,
}


def write(folder: Path) -> None:
    """Write all pages to `folder`; an unchanged page is left alone, so that Sphinx does not read it again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = folder / f"{name}.md", page() + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
