"""Size of explorer pages, and the time that Chromium needs to show them and to change the query.

    dcvit explore --workdir W seven.png --out page.html
    python scripts/bench_explorer.py page.html [page.html …] [--rounds 5] [--changes 40]

Each page is opened in every round, in a new process of the browser. "first paint" and "complete" are milliseconds
since the page was requested, "query" those of one change of the query until all views are drawn. The table has medians
and ranges over all rounds. Chromium is driven by the module `browser` of the tests.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dcvit import cli
from dcvit.errors import ConfigError
from dcvit.reproduction.seeded import machine

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from browser import CHROMIUM, Browser

READY = "explorer.ready.then(() => performance.now())"
PAINT = "performance.getEntriesByType('paint').map(entry => entry.startTime)[0] ?? -1"
CHANGES = """(async () => {
  const tokens = TOKENS, times = [];
  for (let i = 0; i < COUNT; i++) {
    const start = performance.now();
    await explorer.set({query: (i * 7 + 1) % tokens});
    times.push(performance.now() - start);
  }
  return times;
})()"""
TOKENS = "JSON.parse(document.getElementById('facts-data').textContent).samples[0].tokens"
COLUMNS = ("first paint", "complete", "query")


def times(page: Path, changes: int) -> dict[str, list[float]]:
    """Open a page in a new browser and return its times in milliseconds by column."""
    # Processes of the browser may write to the profile for a moment after it has been stopped.
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as profile, Browser(Path(profile)) as browser:
        browser.open(page, width=1280)
        complete = browser.value(READY)
        steps = browser.value(CHANGES.replace("TOKENS", TOKENS).replace("COUNT", str(changes)))
        found = {"first paint": [browser.value(PAINT)], "complete": [complete], "query": steps}
        if browser.messages():
            raise ConfigError(f"{page}: the browser's console has messages: {browser.messages()[0]!r:.200}")
        return found


def row(page: Path, found: dict[str, list[float]]) -> str:
    """Return a row of the table."""
    cells = [f"{statistics.median(found[c]):.0f} ({min(found[c]):.0f}–{max(found[c]):.0f})" for c in COLUMNS]
    return f"| {page.name} | {page.stat().st_size / 1e6:.2f} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; see the module's docstring."""
    parser = cli.Parser(prog="scripts/bench_explorer.py", description="Measure explorer pages in Chromium.")
    parser.add_argument("pages", nargs="+", type=cli.path, help="pages of dcvit explore")
    parser.add_argument("--rounds", type=int, default=5, help="times that each page is opened")
    parser.add_argument("--changes", type=int, default=40, help="changes of the query in each round")
    args = parser.parse_args(argv)
    if CHROMIUM is None:
        raise ConfigError("chromium is not installed")
    found: dict[Path, dict[str, list[float]]] = {page: {c: [] for c in COLUMNS} for page in args.pages}
    for _ in range(args.rounds):
        for page, columns in found.items():
            for column, values in times(page.resolve(), args.changes).items():
                columns[column] += values
    print(machine())
    print("| page | MB | " + " | ".join(f"{c}, ms" for c in COLUMNS) + " |\n" + "|---" * 5 + "|")
    print("\n".join(row(page, columns) for page, columns in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
