"""The page of a report: sections for each evaluation, and the description of the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from xml.etree import ElementTree as ET

from dcvit.evaluators.multilabel import ClassResult
from dcvit.pages.report import measures
from dcvit.pages.report.diagram import reliability_diagram
from dcvit.pages.report.html import Node, document, picture, tag
from dcvit.pages.report.outcomes import BINS, Mistake, Outcomes
from dcvit.parallel.trees import flattened

MATRIX_CLASSES = 20  # up to so many classes, a page shows the confusion matrix
CONFUSIONS = 30  # rows of the list that replaces it
STRONG, FULL = 0.5, 0.8  # shares of a row from which dark text (in the dark scheme) or white text is readable
CLASS_ROWS = 1000  # of the table of classes
NEVER_SHOWN = 20  # classes without predictions that are named below it
NAME_CHARACTERS = 60  # of a class name or a location
NONE = "–"  # in place of a number
DIRECTION_CONTROLS = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd")  # could reorder text


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of one classification evaluator.

    Fields:
      name: its name in the config.
      row: the metrics that `dcvit evaluate` prints, by column.
      outcomes: the counts and mistakes of the evaluation.
      class_names: a name for each class of the model.
      describe: function from the index of an example to its location.
      options: the evaluator's options in the config.
    """

    name: str
    row: Mapping[str, object]
    outcomes: Outcomes
    class_names: Sequence[str]
    describe: Callable[[int], str]
    options: Mapping[str, object]

    def class_name(self, index: int) -> ET.Element:
        """Return an HTML element with a class's name; its direction of writing does not affect the text around it."""
        return tag("bdi", shorten(self.class_names[index]))


@dataclasses.dataclass(frozen=True)
class MultiLabelEvaluation:
    """The result of one multi-label evaluator.

    Fields:
      name: its name in the config.
      row: the metrics that `dcvit evaluate` prints, by column.
      classes: the measures of each class.
      class_names: a name for each class of the model.
      thresholds_from: a sentence about where the thresholds were chosen.
      options: the evaluator's options in the config.
    """

    name: str
    row: Mapping[str, object]
    classes: Sequence[ClassResult]
    class_names: Sequence[str]
    thresholds_from: str
    options: Mapping[str, object]


def render(
    title: str,
    facts: Mapping[str, str],
    settings: Mapping[str, object],
    rows: Sequence[Mapping[str, object]],
    evaluations: Sequence[Evaluation | MultiLabelEvaluation],
) -> str:
    """Return the report of an evaluation as HTML.

    Args:
      title: the name of the model.
      facts: texts that describe the run, by name.
      settings: the config of the run.
      rows: all rows that `dcvit evaluate` prints, also those of other evaluators.
      evaluations: the results of the classification and the multi-label evaluators.
    """
    header = tag("header", tag("p", "Evaluation report", class_="eyebrow"), tag("h1", title))
    parts: list[Node] = [header]
    if len(rows) > 1:
        parts.append(_overview(rows, evaluations))
    for i, evaluation in enumerate(evaluations):
        if isinstance(evaluation, MultiLabelEvaluation):
            parts.append(_multilabel(evaluation, i))
        else:
            parts.append(_evaluation(evaluation, i))
    run = tag("section", tag("h2", "Run"), _values("Run", facts))
    run.append(tag("h3", "Config"))
    run.append(tag("p", "Keys that determine the parameters, unless they have their default value.", class_="note"))
    run.append(_values("Config", flattened(settings)))
    return document(f"{title} · evaluation report", tag("main", *parts, run))


def shorten(text: str) -> str:
    """Return a text cut to `NAME_CHARACTERS`, without the characters that control the direction of writing."""
    shown = text.translate(DIRECTION_CONTROLS)
    return shown if len(shown) <= NAME_CHARACTERS else shown[: NAME_CHARACTERS - 1] + "…"


def percent(value: object, digits: int = 2) -> str:
    """Return a fraction as a text in percent with `digits` decimals, or a dash for None."""
    return f"{100 * value:.{digits}f}\u00a0%" if isinstance(value, int | float) else NONE


def _evaluation(evaluation: Evaluation, number: int) -> ET.Element:
    """Return the section of an evaluator, the one of index `number` in the page."""
    several = evaluation.outcomes.several
    notes = [f"{several:,} images have several labels; a prediction is correct if it is any of them."] * (several > 0)
    if present := evaluation.options.get("present_classes_only"):
        notes.append(f"present_classes_only={present}: only classes that occur in the data are predicted.")
    columns = tag("div", _calibration(evaluation), _confusions(evaluation), class_="columns")
    parts = _tiles(evaluation), columns, _mistakes(evaluation), _classes(evaluation)
    return _section(evaluation, number, notes, parts)


def _section(
    evaluation: Evaluation | MultiLabelEvaluation, number: int, notes: Sequence[str], parts: Sequence[ET.Element]
) -> ET.Element:
    """Return the section of an evaluator, the one of index `number` in the page: its data, notes, parts and options."""
    data = evaluation.options.get("data")
    shown = {key: value for key, value in data.items() if value is not None} if isinstance(data, Mapping) else {}
    if shown:
        notes = [", ".join(f"{key} {value}" for key, value in shown.items()), *notes]
    return tag(
        "section",
        tag("h2", "Evaluation “", tag("bdi", evaluation.name), "”"),
        *(tag("p", note, class_="note") for note in notes),
        *parts,
        tag("details", tag("summary", "Data and preprocessing"), _values("Evaluator", flattened(evaluation.options))),
        id=f"evaluation-{number}",
    )


def _tiles(evaluation: Evaluation) -> ET.Element:
    """Return the list of an evaluation's main numbers: accuracy, recall, calibration error, loss and images."""
    outcomes, row = evaluation.outcomes, evaluation.row
    low, high = measures.wilson(outcomes.correct, outcomes.n)
    error, loss = measures.calibration_error(outcomes), row["loss"]
    interval = f"95\u00a0% interval {100 * low:.2f} to {percent(high)} (Wilson)"
    tiles = [("Accuracy", percent(row["top1"]), interval)]
    if row.get("top5") is not None:
        tiles.append(("Top-5 accuracy", percent(row["top5"]), "a label is among the five best classes"))
    if labels := [(row.examples, -row.number) for row in measures.class_measures(outcomes.pairs)]:
        largest, number = max(labels)
        text = f"accuracy of always “{shorten(evaluation.class_names[-number])}”, the largest class"
        tiles.append(("Baseline", percent(largest / outcomes.pairs.total()), text))
    tiles += [
        ("Mean recall", percent(row.get("mean_recall")), "of the classes, each with equal weight"),
        ("Calibration error", percent(error), f"ECE, {BINS} bins of equal width"),
        ("Loss", f"{loss:.4f}" if isinstance(loss, float) else NONE, "mean, in nats"),
        ("Images", f"{outcomes.n:,}", f"{outcomes.n - outcomes.correct:,} mistakes"),
    ]
    return _tile_list(tiles)


def _tile_list(tiles: Sequence[tuple[str, str, str]]) -> ET.Element:
    """Return a list of numbers, each with its name and a note."""
    items = [
        tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", note, class_="note"))
        for name, value, note in tiles
    ]
    return tag("dl", *items, class_="tiles")


def _calibration(evaluation: Evaluation) -> ET.Element:
    """Return the part of the page with the reliability diagram and its numbers."""
    outcomes = evaluation.outcomes
    bins, error = measures.calibration_bins(outcomes), measures.calibration_error(outcomes)
    kind = "sigmoid of the logit" if outcomes.sigmoid else "softmax probability"
    text = (
        f"Confidence is the {kind} of the predicted class. The expected calibration error (ECE) is the mean of "
        f"|accuracy - confidence| over {BINS} bins of equal width, weighted by their images (Guo et al., 2017)."
    )
    if outcomes.sigmoid:
        text += " The model's loss is a sigmoid loss, so that the confidences of all classes need not add up to 1."
    if outcomes.not_finite:
        text += f" {outcomes.not_finite:,} images without a finite confidence are left out."
    cells = [
        [f"{b.low:.3f} to {b.high:.3f}", f"{b.examples:,}", percent(b.confidence), percent(b.accuracy)] for b in bins
    ]
    header = ("Confidence", "Images", "Mean confidence", "Accuracy")
    legend = [tag("span", tag("i", class_=key), name) for key, name in _LEGEND.items()]
    return tag(
        "div",
        tag("h3", "Calibration"),
        reliability_diagram(bins, f"Reliability diagram with an expected calibration error of {percent(error)}"),
        tag("p", *legend, class_="legend"),
        tag("p", text, class_="note"),
        tag("details", tag("summary", "Numbers of the diagram"), _table("Bins of confidence", header, cells)),
    )


_LEGEND = {"accuracy": "accuracy", "confidence": "mean confidence", "ideal": "perfect calibration"}


def _confusions(evaluation: Evaluation) -> ET.Element:
    """Return the part of the page with the confusion matrix, or with the most frequent confusions of many classes."""
    if len(evaluation.class_names) <= MATRIX_CLASSES:
        text = "Rows are labels, columns are predictions; the color is the share of a row."
        return _part("Confusion matrix", text, _matrix(evaluation))
    found = measures.frequent_confusions(evaluation.outcomes.pairs)
    totals = {row.number: row.examples for row in measures.class_measures(evaluation.outcomes.pairs)}
    cells: list[list[Node]] = [
        [evaluation.class_name(label), evaluation.class_name(other), f"{number:,}", percent(number / totals[label], 1)]
        for label, other, number in found[:CONFUSIONS]
    ]
    header = ("Label", "Prediction", "Images", "Of the label")
    text = f"The {len(cells)} most frequent of {len(found):,} different confusions."
    return _part("Most frequent confusions", text, _table("Confusions", header, cells, names=2))


def _part(title: str, text: str, content: ET.Element) -> ET.Element:
    """Return a part of the page: `title`, `content`, and the note `text` below."""
    return tag("div", tag("h3", title), content, tag("p", text, class_="note"))


def _matrix(evaluation: Evaluation) -> ET.Element:
    """Return the confusion matrix as a table of counts, colored by their share of the row."""
    pairs, classes = evaluation.outcomes.pairs, range(len(evaluation.class_names))
    columns = [tag("th", evaluation.class_name(c), scope="col", title=evaluation.class_names[c]) for c in classes]
    rows = [tag("tr", tag("th", "label", tag("br"), "↓ predicted →", class_="corner"), *columns)]
    for label in classes:
        counts = [pairs.get((label, c), 0) for c in classes]
        cells = [tag("th", evaluation.class_name(label), scope="row", title=evaluation.class_names[label])]
        for c, count in enumerate(counts):
            share = count / max(1, sum(counts))
            kind = "zero" if not count else "hit" if c == label else "miss"
            kind += " strong" * (share > STRONG) + " full" * (share > FULL)
            style = f"--share:{round(12 + 88 * share)}%"
            cells.append(tag("td", f"{count:,}", class_=kind, style=style) if count else tag("td", "0", class_=kind))
        rows.append(tag("tr", *cells))
    long = any(len(name) > 3 for name in evaluation.class_names)
    kind = "matrix vertical" if long else "matrix"
    table = tag("table", tag("tbody", *rows), aria_label="Confusion matrix", class_=kind)
    return tag("div", table, class_="scroll", role="region", aria_label="Confusion matrix", tabindex=0)


def _mistakes(evaluation: Evaluation) -> ET.Element:
    """Return the part of the page with the pictures of the most confident mistakes."""
    mistakes = evaluation.outcomes.mistakes
    if not mistakes:
        return tag("div", tag("h3", "Mistakes"), tag("p", "There is none.", class_="note"))
    text = "The images as the model saw them, after cropping and resizing."
    if any(mistake.image.dtype != "uint8" for mistake in mistakes):
        text += " Each is scaled to the range from black to white."
    if (channels := mistakes[0].image.shape[-1]) not in (1, 3):
        text += f" They show the first of {channels} channels."
    cards = [_card(evaluation, mistake) for mistake in mistakes]
    return tag(
        "div", tag("h3", "Most confident mistakes"), tag("p", text, class_="note"), tag("div", *cards, class_="cards")
    )


def _card(evaluation: Evaluation, mistake: Mistake) -> ET.Element:
    """Return the picture of one mistake with label, prediction, confidence and location."""
    names = [shorten(evaluation.class_names[label]) for label in mistake.labels]
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    predicted = shorten(evaluation.class_names[mistake.prediction])
    confidence = percent(mistake.confidence, 1)
    alt = f"image of {shown}, predicted as {predicted} with confidence {confidence}"
    parts = evaluation.describe(mistake.example).split("/")
    location = parts[0] if len(parts) == 1 else "/".join(parts[-2:])
    return tag(
        "figure",
        picture(mistake.image, alt),
        tag(
            "figcaption",
            tag("span", "predicted ", tag("b", tag("bdi", predicted)), ", ", confidence, class_="wrong"),
            tag("span", "label ", tag("b", tag("bdi", shown))),
            tag("span", tag("bdi", shorten(location)), class_="location"),
        ),
    )


def _classes(evaluation: Evaluation) -> ET.Element:
    """Return the part with measures of each class: in their order, or of many classes with the lowest recall first."""
    found = measures.class_measures(evaluation.outcomes.pairs)
    total = len(evaluation.class_names)
    order = "in the order of their numbers"
    if total > MATRIX_CLASSES:
        found = sorted(found, key=lambda row: (2.0 if row.recall is None else row.recall, row.number))
        order = "with the lowest recall first"
    shown = found[:CLASS_ROWS]
    cells: list[list[Node]] = [
        [
            evaluation.class_name(row.number), f"{row.examples:,}", f"{row.predictions:,}", percent(row.recall),
            percent(row.precision), percent(row.f1),
        ]
        for row in shown
    ]  # fmt: skip
    header = ("Class", "Images", "Predictions", "Recall", "Precision", "F1")
    text = f"{len(shown):,} of {total:,} classes, {order}. "
    if len(found) < total:
        text += f"{total - len(found):,} classes without images and predictions are not listed. "
    if never := [shorten(evaluation.class_names[row.number]) for row in found if not row.predictions]:
        more = f" and {len(never) - NEVER_SHOWN:,} more" if len(never) > NEVER_SHOWN else ""
        text += f"Never predicted: {', '.join(never[:NEVER_SHOWN])}{more}. "
    if evaluation.outcomes.several:
        text += "Images with several labels do not count here and in the confusions. "
    return _part("Classes", text, _table("Classes", header, cells, sortable=True))


def _multilabel(evaluation: MultiLabelEvaluation, number: int) -> ET.Element:
    """Return the section of a multi-label evaluator, the one of index `number` in the page."""
    row, found = evaluation.row, evaluation.classes
    labels, positives = (sum(getattr(each, key) for each in found) for key in ("images", "positives"))
    loss, n = row["loss"], row["n"]
    tiles = [
        ("Mean AP", percent(row["mean_ap"]), "mean of the average precisions of the classes that have images"),
        ("F1, macro", percent(row["f1_macro"]), "mean of the classes that have images"),
        ("F1, micro", percent(row["f1_micro"]), "of all labels together"),
        ("Loss", f"{loss:.4f}" if isinstance(loss, float) else NONE, "of all classes, in nats"),
        ("Labels for an image", f"{positives / max(1, n if isinstance(n, int) else 1):.2f}", f"{positives:,} in all"),
        ("Images", f"{n:,}", f"{labels:,} known labels of {len(found):,} classes"),
    ]
    shown = [*enumerate(found)]
    order = "in the order of their numbers"
    if len(found) > MATRIX_CLASSES:
        shown.sort(key=lambda pair: (2.0 if pair[1].average_precision is None else pair[1].average_precision, pair[0]))
        order = "with the lowest average precision first"
    cells: list[list[Node]] = [
        [
            tag("bdi", shorten(evaluation.class_names[c])), f"{each.positives:,}", f"{each.predictions:,}",
            *(percent(value) for value in (each.average_precision, each.f1, each.precision, each.recall)),
            f"{each.threshold:.3f}", f"{each.images:,}",
        ]
        for c, each in shown[:CLASS_ROWS]
    ]  # fmt: skip
    header = ("Class", "Images", "Predictions", "AP", "F1", "Precision", "Recall", "Threshold", "Known")
    text = (
        f"{len(cells):,} of {len(found):,} classes, {order}. Images have the class, predictions reach its threshold, "
        "and the label of known images is known; others do not count for the class. AP is the average precision, which "
        f"does not depend on the threshold. {evaluation.thresholds_from}"
    )
    classes = _part("Classes", text, _table("Classes", header, cells, sortable=True))
    return _section(evaluation, number, [], [_tile_list(tiles), classes])


def _overview(
    rows: Sequence[Mapping[str, object]], evaluations: Sequence[Evaluation | MultiLabelEvaluation]
) -> ET.Element:
    """Return the table of all evaluations, with links to their sections."""
    sections = {evaluation.name: i for i, evaluation in enumerate(evaluations)}
    titles = {
        "top1": "Top-1", "top5": "Top-5", "mean_recall": "Mean recall", "mean_ap": "Mean AP", "f1_macro": "F1, macro",
        "f1_micro": "F1, micro",
    }  # fmt: skip
    shown = {metric: title for metric, title in titles.items() if any(row.get(metric) is not None for row in rows)}
    cells: list[list[Node]] = []
    for row in rows:
        name, loss, n = str(row["evaluation"]), row.get("loss"), row.get("n")
        link = tag("a", name, href=f"#evaluation-{sections[name]}") if name in sections else name
        shown_loss = f"{loss:.4f}" if isinstance(loss, float) else NONE
        cells.append([link, *(percent(row.get(metric)) for metric in shown), shown_loss, f"{n:,}"])
    header = ("Evaluation", *shown.values(), "Loss (nats)", "Images")
    return tag("section", tag("h2", "Results"), _table("Results", header, cells))


def _table(
    name: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Node]],
    *,
    names: int = 1,
    sortable: bool = False,
) -> ET.Element:
    """Return an HTML table that scrolls if it is large; its first `names` columns are text, the others numbers."""
    heads = [
        tag("th", tag("button", text, type="button") if sortable else text, scope="col", class_=kind)
        for i, text in enumerate(header)
        for kind in (["text"] if i < names else ["number"])
    ]
    lines = []
    for row in rows:
        first = tag("th", row[0], scope="row", class_="text")
        rest = [tag("td", cell, class_="text" if i < names else "number") for i, cell in enumerate(row[1:], start=1)]
        lines.append(tag("tr", first, *rest))
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *lines), aria_label=name)
    if sortable:
        table.set("class", "sortable")
    return tag("div", table, class_="scroll", role="region", aria_label=name, tabindex=0)


def _values(name: str, values: Mapping[str, object]) -> ET.Element:
    """Return an HTML table with the label `name` and a row for each name and value."""
    rows = [
        tag("tr", tag("th", key, scope="row"), tag("td", value if isinstance(value, str) else json.dumps(value)))
        for key, value in values.items()
    ]
    return tag("table", tag("tbody", *rows), aria_label=name, class_="values")
