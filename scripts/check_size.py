"""Check of the size of the code: `python scripts/check_size.py`. `.ci/run checks` runs it.

The bounds leave room for several contributions. A change that exceeds one removes what it made unnecessary, or raises
the bound on purpose.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Lines of Python in folders, docstrings and comments included.
MOST_LINES = {("dcvit", "input_pipeline"): 39_820, ("tests",): 29_730, ("scripts",): 3_880}
MOST_ANY = 200  # occurrences of `Any` outside the tests and import lines
ADVICE = (
    "remove what the change made unnecessary (`git diff --stat origin/HEAD` shows where it adds lines), or raise the "
    "bound in scripts/check_size.py in the same commit, whose message says what it is for"
)


def main():
    """Print each count and its bound; return exit status 1 if a count exceeds its bound."""
    lines = {folders: [line for folder in folders for line in lines_of(folder)] for folders in MOST_LINES}
    rows = [(f"lines of Python in {' and '.join(f)}", len(lines[f]), bound) for f, bound in MOST_LINES.items()]
    typed = [line for folders in lines.keys() - {("tests",)} for line in lines[folders]]
    any_count = sum(len(re.findall(r"\bAny\b", line)) for line in typed if not re.match(r"\s*(from|import)\b", line))
    rows.append(("annotations `Any`", any_count, MOST_ANY))
    for what, count, bound in rows:
        print(f"{what}: {count:,}, at most {bound:,}")
    exceeded = [f"{what} exceed their bound by {count - bound:,}" for what, count, bound in rows if count > bound]
    for line in exceeded:
        print(f"error: {line}: {ADVICE}", file=sys.stderr)
    return int(bool(exceeded))


def lines_of(folder):
    """Return all lines of the Python files in a folder of the repository."""
    return [line for path in (ROOT / folder).rglob("*.py") for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
