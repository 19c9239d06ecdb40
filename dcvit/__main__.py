"""Entry point `dcvit COMMAND …`, equivalent to `python -m dcvit.COMMAND …`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.cli import COMMANDS
from dcvit.errors import ConfigError, nearest
from dcvit.versions import __version__


def dispatch(argv: Sequence[str] | None) -> int:
    """Run the command named by the first word and return its exit status.

    Raises:
      ConfigError: there is no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and words[1:2] not in ([], ["config"]):
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_config_help(words[2:]) if words[1:2] == ["config"] else _usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"dcvit {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(f"unknown command {words[0]!r}; {nearest(words[0], COMMANDS, 'dcvit ')}")
    return int(importlib.import_module(f"dcvit.{words[0].replace('-', '_')}").main(words[1:]))


def _usage() -> str:
    commands = [f"  {name:14}{description}" for name, description in COMMANDS.items()]
    helps = [
        "  help COMMAND      options and examples of a command",
        "  help config       all keys of a config",
        "  help config NAME  commands, arguments and keys of a config, such as vit_digits",
    ]
    return "\n".join(["usage: dcvit [--version] COMMAND [options]", "", *commands, "", *helps])


def _config_help(names: Sequence[str]) -> str:
    """Return the help of configs, or a text with the type, the default and the meaning of every config key."""
    from dcvit.config import load, values

    if names:
        return "\n\n".join(map(load.describe, names))
    lines = ["Keys of a config; --config.KEY=VALUE sets one on the command line.", ""]
    for name, kind, default, text in values.describe_keys():
        lines += [f"{name}: {kind}" + (f" = {default}" if default else ""), f"    {text}"]
    return "\n".join(lines)


def main() -> int:
    """Run the `dcvit` command line."""
    return cli.run(dispatch)


if __name__ == "__main__":
    sys.exit(main())
