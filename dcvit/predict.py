"""Prediction: `python -m dcvit.predict --workdir DIR FILE … FOLDER … [--topk N] [--format table|csv|json]`.

Classifies image files, and all image files in folders, with a trained model. The rows of a batch of files are printed
as soon as they are computed. By default each file has one line; CSV and JSON have a row for each file and class. A
multi-label model predicts all classes whose probability reaches their threshold; a file without any has "none" in its
line, or a row of rank 0. For a file that cannot be read, an error is printed on stderr and the exit status is 1; the
other files are still classified.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import escaped


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit predict",
        examples=[
            "dcvit predict --workdir runs/digits image.png folder/",
            "dcvit predict --workdir runs/digits folder/ --topk 1 --format csv",
        ],
    )
    parser.add_argument("images", nargs="*", type=cli.path, help="image files, and folders of them")
    text = "number of classes to show for each image; by default 5, or those that reach their thresholds"
    parser.add_argument("--topk", type=cli.at_least(1), help=text)
    cli.add_model_options(parser, image_size=True)
    args, overrides = parser.parse(argv)
    if not args.images:
        parser.error("no image files: give files, or folders of them")
    config = cli.check_model(args, overrides)

    from dcvit.inference import images
    from input_pipeline.images.folder import find_images

    cli.start_jax()
    model = images.ImageModel.of(cli.open_model(args, config, overrides))
    failed: list[str] = []

    def fail(line: str) -> None:
        failed.append(line)
        cli.print_error(line)

    files = find_images(args.images, fail)
    batches = model.classify(images.read_images(files, model.pp, fail), args.topk)
    if args.format == "table":
        for row in itertools.chain.from_iterable(batches):
            found = [f"{escaped(p.label)} {100 * p.probability:.1f} %" if p.rank else "none" for p in row]
            print("  ".join([escaped(row[0].file), *found]), flush=True)
    else:
        cli.show((p._asdict() for batch in batches for predictions in batch for p in predictions), args.format)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
