"""A table with numbers of the paper and measured ones, written as Markdown, CSV and a picture."""

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from dcvit.runs.files import replace

Cell = str | int | float | None
Row = Mapping[str, Cell]


class Table(NamedTuple):
    """A table of results, with notes and a picture. A row's keys are the columns, the same for all rows."""

    name: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    figure: Figure | None = None


def write(table: Table, out: Path) -> None:
    """Write NAME.md, NAME.csv and, for a table with a picture, NAME.png to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    replace(out / f"{table.name}.md", markdown(table))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table.rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    replace(out / f"{table.name}.csv", text.getvalue())
    if table.figure is not None:
        table.figure.savefig(out / f"{table.name}.png", dpi=120)


def markdown(table: Table) -> str:
    """Return the Markdown text of a table: title, rows, its picture and notes, whose lines are items of a list."""
    columns = list(table.rows[0])
    cells = [columns, ["---"] * len(columns), *([shown(row[name]) for name in columns] for row in table.rows)]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    picture = [] if table.figure is None else [f"![{table.title}]({table.name}.png)"]
    notes = [textwrap.fill(f"- {note}", 120, subsequent_indent="  ") for note in table.notes]
    return "\n\n".join([f"# {table.title}", grid, *picture, "\n".join(notes)]) + "\n"


def shown(value: Cell) -> str:
    """Return the text of a cell: four digits of a number with a fraction, 0 for a rounding error, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{round(value, 12) + 0.0:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def bars(rows: Sequence[Row], label: str, ours: str, paper: str, interval: str | None = None) -> Figure:
    """Return a picture of horizontal bars: our values left, with intervals, and the paper's right."""
    figure = Figure((9, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, column, width in zip(axes, (ours, paper), (interval, None), strict=True):
        known = [(place, row[column], row[width] or 0 if width else 0) for place, row in enumerate(rows) if row[column]]
        places, values, errors = zip(*known, strict=True)
        axis.barh(places, values, xerr=errors)
        if min(values) > 0.5 * max(values):  # the differences would not show from 0
            margin = 0.5 * (max(values) - min(values)) + max(errors) + 1e-9
            axis.set_xlim(min(values) - margin, max(values) + margin)
        axis.set_title(column)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(rows)), [str(row[label]) for row in rows])
    axes[0].invert_yaxis()
    return figure


def curves(rows: Sequence[Row], label: str, x: str, y: str, scale: str = "linear") -> Figure:
    """Return a picture of curves y(x), one for each value in the column `label`, with the intervals in "± 95 %"."""
    figure = Figure((6, 4.5), layout="constrained")
    axis = figure.subplots()
    for marker, name in zip("os^vD<", dict.fromkeys(row[label] for row in rows), strict=False):
        places, values, errors = zip(*((r[x], r[y], r["± 95 %"] or 0) for r in rows if r[label] == name), strict=True)
        axis.errorbar(places, values, errors, marker=marker, capsize=2, label=str(name))
    axis.set(xscale=scale, yscale=scale, xlabel=x, ylabel=y)
    axis.grid(which="both", alpha=0.3)
    axis.legend()
    return figure


def maps(rows: Sequence[Row], down: str, across: str, label: str) -> Figure:
    """Return a grid of matrices: the columns `down` and `across` select one, and its columns follow that of `label`."""
    names = list(rows[0])
    columns = names[names.index(label) + 1 :]
    places = [[*dict.fromkeys(row[column] for row in rows)] for column in (down, across)]
    figure = Figure((1.2 + 1.6 * len(places[1]), 2.2 * len(places[0])), layout="constrained")
    for line, a in zip(figure.subplots(*map(len, places)), places[0], strict=True):
        most = max(abs(row[name]) for row in rows if row[down] == a for name in columns)
        for axis, b in zip(line, places[1], strict=True):
            panel = [row for row in rows if (row[down], row[across]) == (a, b)]
            matrix = [[row[name] for name in columns] for row in panel]
            image = axis.imshow(matrix, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
            axis.set_title(f"{a}: {b}", fontsize=8)
            axis.set_xticks(range(len(columns)), columns, fontsize=6)
            axis.set_yticks(range(len(panel)), [str(row[label]) for row in panel], fontsize=6)
        figure.colorbar(image, ax=list(line))
    return figure
