"""HTML pages that are one file each, from the templates of this folder."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from PIL import Image

from dcvit.errors import ConfigError
from dcvit.parallel.trees import flattened

TEMPLATES = Path(__file__).parent / "templates"
PICTURE_PIXELS = 224  # of the longer side; larger images are reduced
SMALL_PIXELS = 64  # images up to this size are stored without loss and shown with sharp pixels
JPEG_QUALITY = 80
NAME_CHARACTERS = 60  # of a class name or a location
NONE = "–"  # in place of a number
DIRECTION_CONTROLS = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd")  # could reorder text


def check_path(path: Path, option: str, suffixes: Sequence[str] = (".html", ".htm")) -> None:
    """Raise ConfigError if a file cannot be written to the path of an option; an existing file may be replaced."""
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {path}: expected a name ending in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder, expected a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as e:
        raise ConfigError(f"{option} {path}: cannot write to the folder {path.parent}: {e.strerror}") from None


def shorten(text: str) -> str:
    """Return a text cut to `NAME_CHARACTERS`, without the characters that control the direction of writing."""
    shown = text.translate(DIRECTION_CONTROLS)
    return shown if len(shown) <= NAME_CHARACTERS else shown[: NAME_CHARACTERS - 1] + "…"


def percent(value: object, digits: int = 2) -> str:
    """Return a fraction as a text in percent with `digits` decimals, or a dash for None."""
    return f"{100 * value:.{digits}f}\u00a0%" if isinstance(value, int | float) else NONE


def document(template: str, scripts: Sequence[str], **context: object) -> str:
    """Return a page, in ASCII: other characters are references.

    The page's security policy forbids every request, and every script except the given ones.

    Args:
      template: the name of a template, which has a style sheet of the same name and extends page.html.
      scripts: names of JavaScript files in ASCII.
      **context: the variables of the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "percent": percent, "shorten": shorten, "json": json.dumps, "count": "{:,}".format, "picture": picture,
        "flattened": flattened,
    }  # fmt: skip
    script = '"use strict";\n' + "\n".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = (TEMPLATES / f"{template}.css").read_text(encoding="utf-8")
    page = environment.get_template(f"{template}.html").render(style=style, script=script, digest=digest, **context)
    return page.encode("ascii", "xmlcharrefreplace").decode() + "\n"


def picture(image: np.ndarray) -> dict[str, object]:
    """Return the attributes `src`, `width`, `height` and `class` of an image element with its file inside.

    Args:
      image: height × width × channels; uint8, or floats, which are mapped linearly so that the lowest is black and the
        highest is white. One channel is gray; of other numbers than 3, the first is shown.
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
    return {"src": source, "width": shown.width, "height": shown.height, "class": "sharp" if small else "smooth"}
