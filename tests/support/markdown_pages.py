"""The Markdown pages of the project, and the code blocks and names in them."""

import re
import runpy
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
    if "generated" not in path.parts and "_build" not in path.parts
)


def blocks(page, language, marker=""):
    """The code blocks of a language; with a marker, those that directly follow this line."""
    before = f"^{re.escape(marker)}\n" if marker else "^"
    return re.findall(rf"{before}```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(text):
    """The command lines of a block, with continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def run_commands(lines, folder, monkeypatch):
    """Run command lines in a folder that has links to the repository's configs, scripts and tests."""
    from dcvit import __main__, cli

    for name in ("configs", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    for line in lines:
        program, *words = shlex.split(line)
        if program == "python":
            monkeypatch.setattr("sys.argv", words)
            runpy.run_path(words[0], run_name="__main__")
        else:
            assert program == "dcvit"
            assert cli.run(__main__.dispatch, words) == 0, line
