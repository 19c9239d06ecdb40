"""Sphinx configuration. `bash scripts/docs.sh` builds the site with warnings as errors."""

import logging
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import reference_pages  # noqa: E402 - found beside this file

import dcvit  # noqa: E402

project = "dcvit"
author = "the dcvit authors"
copyright = author
version = release = dcvit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"dcvit {version}"
html_last_updated_fmt = "%Y-%m-%d"
html_show_copyright = False
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "ignore-module-all": True}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_custom_sections = [("Fields", "params_style")]

# Model of the package -> the images and the texts that its explorer page shows.
EXPLORERS = {
    "digits": (["seven.png", "four.png"], []),
    "tasks": ([], ["wolf . wolf . cello . odd the", "goat . wolf . cello . unlike initial animal"]),
    "text": ([], ["def main(argv):\n    return ", "import os\nimport sys\n"]),
}

# Source file that a page links to -> the page of the site that is generated from it.
GENERATED = {
    "input_pipeline/source.py": "data_kinds.md",
    "dcvit/config/keys.py": "config_keys.md",
    "dcvit/models/attention.py": "models.md#attention",
    "dcvit/models/vit.py": "models.md",
}

SECTION = re.compile(r"(\s*)(Args|Fields|Raises|Returns|Yields)(, .*)?:$")


def markdown_to_rst(app, what, name, obj, options, lines):
    """Docstrings use Markdown's `code`; autodoc reads reStructuredText. Napoleon reads the sections afterwards."""
    result: list[str] = []
    in_section, literal = False, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if match := SECTION.match(line):
            in_section, literal = True, False
            line = f"{match[1]}{match[2]}:"  # napoleon knows only the plain name of a section
        elif line and indent == 0:
            in_section = literal = False
        if line and indent and not in_section and not literal:
            result += ["::", ""] if not result or not result[-1] else ["", "::", ""]
            literal = True
        result.append(line if literal else escape(line))
    lines[:] = result


def escape(line: str) -> str:
    """Double backticks, and escape characters outside them that are markup in reStructuredText."""
    parts = line.split("`")
    if len(parts) % 2 == 0:
        return line
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*|\\]|_\b)", r"\\\1", parts[i])
    for i in range(1, len(parts), 2):  # a literal ends before a space or punctuation, or before an escaped space
        parts[i + 1] = re.sub(r"^(?=\w|\\)", r"\\ ", parts[i + 1])
        parts[i - 1] = re.sub(r"(?<=\w)$", r"\\ ", parts[i - 1])
    return "``".join(parts)


def short_annotations(app, what, name, obj, options, signature, returns):
    """Shape annotations without the module of JAX's array type."""
    return tuple(text and text.replace("jaxlib._jax.Array", "Array") for text in (signature, returns))


def skip_fields(app, what, name, obj, skip, options):
    """Skip fields: those of a NamedTuple, and defaults that are functions or classes of other libraries."""
    if (getattr(obj, "__doc__", "") or "").startswith("Alias for field number"):
        return True
    origin = (getattr(obj, "__module__", None) or "dcvit").partition(".")[0]
    return True if callable(obj) and origin not in ("dcvit", "input_pipeline") else None


def link_site(app, docname, source):
    """Link what the site has and a clone lacks: generated pages for their sources, and named explorer pages."""
    text = re.sub(r"`explorer/(\w+)\.html`", r'<a href="explorer/\1.html">\1</a>', source[0])
    for file, page in GENERATED.items():
        text = re.sub(rf"\]\((\.\./)+{re.escape(file)}\)", f"](/reference/generated/{page})", text)
    source[0] = text


def write_explorers(app, exception):
    """Write the explorer pages of the package's models into the folder `explorer` of a complete HTML site."""
    if exception is not None or app.builder.format != "html":
        return
    from dcvit.pages.explorer import Options, explore

    logging.getLogger("dcvit").setLevel(logging.WARNING)  # not the choice of an implementation for each pass

    def fail(line):
        raise RuntimeError(line)

    folder = Path(app.outdir) / "explorer"
    folder.mkdir(exist_ok=True)
    for name, (images, texts) in EXPLORERS.items():
        files = [HERE.parent / "tests" / "data" / image for image in images]
        page = explore([dcvit.load(name)], files, texts, Options(), fail)
        (folder / f"{name}.html").write_text(page)


def setup(app):
    """Generate the reference pages before Sphinx looks for pages, and register the changes to the Python API."""
    reference_pages.write(HERE / "reference" / "generated")
    app.connect("autodoc-process-docstring", markdown_to_rst, priority=100)
    app.connect("autodoc-process-signature", short_annotations)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("source-read", link_site)
    app.connect("build-finished", write_explorers)
