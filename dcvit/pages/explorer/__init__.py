"""Explorer of composed heads: one HTML file that recomputes composition in the browser.

`samples` packs the arrays of an input: queries, keys, values and the compose weights. `render` makes the file. The page
computes scores, compositions and softmax from these arrays (`attention.js`), draws them (`views.js`) and handles the
controls (`explorer.js`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from dcvit.interpret.contributions import AverageContributions
from dcvit.pages.explorer.samples import Json, Sample
from dcvit.pages.report.html import Node, document, tag

SCRIPTS = ("attention", "views", "explorer", "controls")
DIGITS = 5  # of averages


def render(title: str, runs: Sequence[Json], samples: Sequence[Sample]) -> str:
    """Return the page as HTML.

    Args:
      title: title of the window.
      runs: for each model its `name`, `facts` in one line, and optionally `averages` and `diversity` as JSON data.
      samples: the inputs. Their facts have the `run` (index of the model), a `name`, and of an image `picture`, `rows`,
        `columns` and `extra` (number of tokens before the patches), of a text its tokens as `text`.
    """
    folder = Path(__file__).parent
    facts = json.dumps({"runs": runs, "samples": [s.facts for s in samples]}, allow_nan=False, separators=(",", ":"))
    body: list[Node] = [ET.fromstring((folder / "explorer.html").read_text(encoding="utf-8"))]
    body.append(tag("script", facts.replace("<", "\\u003c"), type="application/json", id="facts-data"))
    for sample in samples:
        body += [tag("script", packed, type="text/plain", id=block) for block, packed in sample.blocks.items()]
    script = '"use strict";\n' + "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    return document(title, *body, style=(folder / "explorer.css").read_text(encoding="utf-8"), script=script)


def average_facts(found: AverageContributions, data: str) -> Json:
    """Return averages of contributions between heads as JSON data; `data` is the name of the data that they are of."""
    return {
        "data": data,
        "examples": found.examples,
        "entropy": found.entropy.round(DIGITS).tolist(),
        "share": {where: share.round(DIGITS).tolist() for where, share in found.share.items()},
        "dynamic": {where: dynamic.round(DIGITS).tolist() for where, dynamic in found.dynamic.items()},
    }
