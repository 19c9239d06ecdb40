"""Draws random sentences from docstrings, comments, messages and documentation, for reviews of the language.

    python scripts/sample_prose.py --seed 0 --count 200

Each sentence is printed with its file and line. A reader should understand it without looking at the code.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("dcvit", "input_pipeline", "configs", "scripts", "examples", "tests")
WORDS = 4  # fewer words are labels, not sentences
Passage = tuple[int, str]  # first line, text


def python_passages(source: str) -> Iterator[Passage]:
    """Yield docstrings, error messages and comments of a Python file; adjacent comment lines are one passage."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, doc
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.lineno, ast.unparse(node.exc.args[0]).removeprefix("f")[1:-1]
    last, first, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# ?(type|fmt|noqa)\b", token.string):
            continue
        trailing = bool(token.line[: token.start[1]].strip())
        if (trailing or token.start[0] != last + 1) and lines:
            yield first, " ".join(lines)
            lines = []
        first = first if lines else token.start[0]
        last = 0 if trailing else token.start[0]
        lines.append(token.string.lstrip("# "))
    if lines:
        yield first, " ".join(lines)


def markdown_passages(source: str) -> Iterator[Passage]:
    """Yield the paragraphs of a Markdown file, without code blocks and tables."""
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL)
    line = 1
    for paragraph in text.split("\n\n"):
        if not paragraph.lstrip().startswith(("|", "#", "<")):
            yield line, paragraph
        line += paragraph.count("\n") + 2


def sentences(passage: str) -> list[str]:
    """Split a passage into sentences; list items and arguments of a docstring are sentences of their own."""
    parts = re.split(r"\n\s*\n|\n\s*(?=[\w`*, ]+:\s)|\n\s*[-*] ", passage)
    flat = [" ".join(part.split()) for part in parts]
    found = [sentence for part in flat for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`\"])", part)]
    return [sentence for sentence in found if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= WORDS]


def corpus() -> list[str]:
    """Return "file:line: sentence" for every sentence of the project."""
    found = []
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([*files, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        read = python_passages if path.suffix == ".py" else markdown_passages
        for line, passage in read(path.read_text()):
            found += [f"{path.relative_to(ROOT)}:{line}: {sentence}" for sentence in sentences(passage)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    found = corpus()
    print(f"{min(args.count, len(found))} of {len(found)} sentences, seed {args.seed}")
    print("\n".join(random.Random(args.seed).sample(found, min(args.count, len(found)))))


if __name__ == "__main__":
    main()
