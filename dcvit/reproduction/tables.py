"""A table with numbers of the paper and measured ones, written as Markdown, CSV and a picture."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from dcvit.runs.files import replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | None
Row = Mapping[str, Cell]
WIDTH = 120  # of the notes in Markdown, in columns


class Chart(NamedTuple):
    """Columns that the picture shows as bars: measured values and, if there are any, the paper's."""

    label: str
    ours: str
    interval: str | None = None  # half the width of an interval of ours
    paper: str | None = None

    def figure(self, rows: Sequence[Row]) -> Figure:
        """Return the picture of horizontal bars: measured values left and, if the table has them, the paper's right."""
        from matplotlib.figure import Figure  # takes long to import

        sides = [("here", self.ours, self.interval)]
        if self.paper is not None:
            sides.append(("paper", self.paper, None))
        size = (4.5 * len(sides), 1.2 + 0.3 * len(rows))
        figure = Figure(size, layout="constrained")
        axes = figure.subplots(1, len(sides), sharey=True, squeeze=False)
        for axis, (title, column, interval) in zip(axes[0], sides, strict=True):
            places = range(len(rows))  # names may look like dates, which matplotlib converts
            values, errors = _numbers(rows, column), None if interval is None else _numbers(rows, interval)
            axis.barh(places, values, xerr=errors)
            axis.set_title(column if title in column else f"{title}: {column}")
            axis.margins(y=0.01)
            known = [value for value, row in zip(values, rows, strict=True) if row[column] is not None]
            if min(known) > 0.5 * max(known):  # the differences would not show from 0
                span = max(known) - min(known)
                widest = max(errors or [0])
                axis.set_xlim(min(known) - 0.5 * span - widest - 1e-9, max(known) + 0.2 * span + widest)
            axis.grid(axis="x", alpha=0.3)
        axes[0][0].set_yticks(range(len(rows)), [f"{row[self.label]}" for row in rows])
        axes[0][0].invert_yaxis()
        return figure


class Curves(NamedTuple):
    """Columns that the picture shows as curves y(x), one curve for each value in the column `label`."""

    label: str
    x: str
    y: str
    interval: str | None = None  # half the width of an interval of y
    scale: Literal["log", "linear"] = "log"  # of both axes

    def figure(self, rows: Sequence[Row]) -> Figure:
        """Return the picture of the curves, one for each value in the column `label`, with intervals as error bars."""
        from matplotlib.figure import Figure  # takes long to import

        figure = Figure((6, 4.5), layout="constrained")
        axis = figure.subplots()
        for number, label in enumerate(dict.fromkeys(row[self.label] for row in rows)):
            points = [row for row in rows if row[self.label] == label]
            x, y = (_numbers(points, column) for column in (self.x, self.y))
            errors = None if self.interval is None else _numbers(points, self.interval)
            axis.errorbar(x, y, errors, marker="os^vD<>"[number % 7], capsize=2, label=f"{label}")
        axis.set(xscale=self.scale, yscale=self.scale, xlabel=self.x, ylabel=self.y)
        if self.scale == "log":
            axis.yaxis.set_major_formatter("{x:.2f}")
            axis.yaxis.set_minor_formatter("{x:.2f}")
        axis.grid(which="both", alpha=0.3)
        axis.legend()
        return figure


class Maps(NamedTuple):
    """Columns that the picture shows as a grid of matrices. Matrices in one row of the grid share a color scale.

    Fields:
      down, across: columns of the table whose values select the row and the column of the grid.
      label: the column that names the rows of each matrix.
      columns: the columns of the table that are the columns of each matrix.
    """

    down: str
    across: str
    label: str
    columns: Sequence[str]

    def figure(self, rows: Sequence[Row]) -> Figure:
        """Return the picture of the matrices, one for each pair of values in the columns `down` and `across`."""
        from matplotlib.figure import Figure  # takes long to import

        down, across = ([*dict.fromkeys(row[column] for row in rows)] for column in (self.down, self.across))
        panels = {
            (i, j): [row for row in rows if (row[self.down], row[self.across]) == (a, b)]
            for i, a in enumerate(down)
            for j, b in enumerate(across)
        }
        heights = [0.8 + 0.2 * len(panels[i, 0]) for i in range(len(down))]
        figure = Figure((1.2 + 1.6 * len(across), sum(heights)), layout="constrained")
        axes = figure.subplots(len(down), len(across), squeeze=False, height_ratios=heights)
        for i, a in enumerate(down):
            matrices = [[_numbers(panels[i, j], column) for column in self.columns] for j in range(len(across))]
            most = max(abs(x) for matrix in matrices for column in matrix for x in column) or 1.0
            for j, (axis, matrix) in enumerate(zip(axes[i], matrices, strict=True)):
                image = axis.imshow([*zip(*matrix, strict=True)], cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
                axis.set_title(f"{a}: {across[j]}", fontsize=8)
                axis.set_xticks(range(len(self.columns)), self.columns, fontsize=6)
                labels = [f"{row[self.label]}" for row in panels[i, j]] if j == 0 else []
                axis.set_yticks(range(len(labels)), labels, fontsize=6)
            figure.colorbar(image, ax=axes[i].tolist())
        return figure


class Table(NamedTuple):
    """A table of results, with notes and a picture. A row's keys are the columns, the same for all rows."""

    name: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    chart: Chart | Curves | Maps | None = None


def write(table: Table, out: Path) -> None:
    """Write NAME.md, NAME.csv and, for a table with a chart, NAME.png to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    replace(out / f"{table.name}.md", markdown(table))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table.rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    replace(out / f"{table.name}.csv", text.getvalue())
    if table.chart is not None:
        table.chart.figure(table.rows).savefig(out / f"{table.name}.png", dpi=120)


def markdown(table: Table) -> str:
    """Return the Markdown text of a table: title, rows, a link to its picture, and notes."""
    picture = [] if table.chart is None else [f"![{table.title}]({table.name}.png)"]
    return "\n\n".join([f"# {table.title}", grid(table.rows), *picture, *map(wrapped, table.notes)]) + "\n"


def wrapped(note: str) -> str:
    """Return a note with line breaks, in lines of at most `WIDTH` characters; items of lists keep their own lines."""
    lines = []
    for line in note.splitlines():
        indent = "  " if line.startswith("- ") else ""
        lines += textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]  # fmt: skip
    return "\n".join(lines)


def grid(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([shown(row[name]) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Cell) -> str:
    """Return the text of a cell: four digits of a number with a fraction, 0 for a rounding error, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{round(value, 12) + 0.0:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def _numbers(rows: Sequence[Row], column: str) -> list[float]:
    """Return the numbers in a column of the rows; a cell that is not a number gives 0."""
    return [value if isinstance(value := row[column], int | float) else 0.0 for row in rows]
