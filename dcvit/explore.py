"""Explorer of composed heads: `python -m dcvit.explore --workdir DIR FILE … --out explore.html`.

Writes one HTML file that shows how the heads of a model compose on given inputs: scores and weights before and after
each composition, the maps between heads by branch, contributions of one head to another, ablations, and comparisons of
inputs and of two models. The page needs no network. It recomputes attention in the browser, so that branches and heads
can be switched off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dcvit import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit explore",
        examples=[
            "dcvit explore --workdir runs/digits image.png --out explore.html",
            "dcvit explore --workdir runs/digits image.png --compare runs/plain",
            'dcvit explore --workdir runs/text --prompt "def main("',
        ],
    )
    parser.add_argument("files", nargs="*", type=cli.path, help="image files and folders of them, or text files")
    parser.add_argument(
        "--workdir", "--model", type=cli.model, required=True,
        help="folder of a run, a checkpoint, other libraries' weights, or the name of a model of the package",
    )  # fmt: skip
    parser.add_argument("--config", help="config of a checkpoint that is in no workdir")
    parser.add_argument("--compare", type=cli.model, help="a second model, as --workdir")
    parser.add_argument("--prompt", action="append", default=[], help="text for a language model; may be repeated")
    parser.add_argument("--out", type=cli.path, default=Path("explore.html"), help="HTML file, replaced if it exists")
    parser.add_argument("--layers", type=layers, help="layers to show, such as 0,5,-1, if not all")
    parser.add_argument("--length", type=cli.at_least(1), default=256, help="largest number of tokens of a text")
    parser.add_argument("--no_ablations", action="store_true", help="omit the predictions after ablations")
    parser.set_defaults(checkpoint=None)
    args, overrides = parser.parse(argv)
    config = cli.check_model(args, overrides)

    from dcvit.inference.model import load
    from dcvit.pages.explorer import Options, explore
    from dcvit.pages.html import check_path
    from dcvit.runs.files import replace

    check_path(args.out, "--out")
    cli.start_jax()
    models = [load(args.workdir, config=config)]
    if args.compare is not None:
        models.append(load(args.compare))
    failed: list[str] = []

    def fail(line: str) -> None:
        failed.append(line)
        cli.print_error(line)

    options = Options(args.layers, args.length, not args.no_ablations)
    page = explore(models, args.files, args.prompt, options, fail)
    replace(args.out, page)
    print(f"explorer: {args.out} ({len(page) / 1e6:.1f} MB)")
    return 1 if failed else 0


def layers(text: str) -> list[int]:
    """Return the numbers of layers that the text of an option gives."""
    return [int(layer) for layer in text.split(",")]


if __name__ == "__main__":
    sys.exit(cli.run(main))
