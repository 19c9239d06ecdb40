"""HTML elements of a page that is one file; all text and attributes are escaped when the page is written."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
from PIL import Image

Node = ET.Element | str
PICTURE_PIXELS = 224  # of the longer side; larger images are reduced
SMALL_PIXELS = 64  # images up to this size are stored without loss and shown with sharp pixels
JPEG_QUALITY = 80


def tag(name: str, *children: Node | None, **attributes: str | int) -> ET.Element:
    """Return an HTML element; in names of attributes `_` becomes `-`, and is dropped at the end, as in `class_`."""
    element = ET.Element(name, {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, ET.Element):
            element.append(child)
        elif child is not None and len(element):
            element[-1].tail = (element[-1].tail or "") + child
        elif child is not None:
            element.text = (element.text or "") + child
    return element


def document(title: str, *body: Node, style: str | None = None, script: str | None = None) -> str:
    """Return a page with a style and a script inside, in ASCII: other characters are references.

    The page's security policy forbids every request, and every script except the given one.

    Args:
      title: title of the window.
      *body: the elements of the page.
      style, script: CSS and JavaScript in ASCII; by default those of the report.
    """
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8") if style is None else style
    script = (folder / "page.js").read_text(encoding="utf-8") if script is None else script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", style),
    )
    page = tag("html", head, tag("body", *body, tag("script", script)), lang="en")
    return "<!DOCTYPE html>\n" + ET.tostring(page, encoding="us-ascii", method="html").decode() + "\n"


def picture(image: np.ndarray, alt: str) -> ET.Element:
    """Return an image element that holds its file: PNG for small images, otherwise JPEG.

    Args:
      image: height × width × channels; uint8, or floats, which are mapped linearly so that the lowest is black and the
        highest is white. One channel is gray; of other numbers than 3, the first is shown.
      alt: the text in place of the image.
    """
    pixels = image if image.shape[-1] == 3 else image[..., :1]
    if pixels.dtype != np.uint8:
        finite = np.nan_to_num(pixels.astype(np.float64))
        low, high = finite.min(), finite.max()
        pixels = np.rint((finite - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    shown = Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0])
    small = max(shown.size) <= SMALL_PIXELS
    shown.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    file = io.BytesIO()
    if small:
        shown.save(file, "PNG", optimize=True)
    else:
        shown.save(file, "JPEG", quality=JPEG_QUALITY)
    source = f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
    size = {"width": shown.width, "height": shown.height}
    return tag("img", src=source, alt=alt, **size, class_="sharp" if small else "smooth")
