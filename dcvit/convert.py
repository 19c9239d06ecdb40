"""Conversion: `python -m dcvit.convert SRC … DST --to npz|safetensors|hf|timm|onnx|stablehlo|dcvit`.

SRC is a workdir, one of its checkpoints, or weights of another library; DST is a new folder. The command ends with a
comparison of the logits of both sides, and prints the largest difference. If the logits differ, or anything else fails,
nothing is left at DST. A killed process leaves a temporary folder beside it, `.DST.unfinished-…`.

With `--average`, several models SRC of the same architecture are averaged to one (`dcvit.hub.soup`).

`--push OWNER/NAME` uploads DST to a repository of the Hugging Face Hub, in one commit. If the upload fails, DST stays;
`hf upload OWNER/NAME DST` uploads it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcvit import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit convert",
        examples=[
            "dcvit convert runs/digits digits_hf --to hf",
            "dcvit convert hf:openai-community/gpt2 runs/gpt2 --to dcvit",
            "dcvit convert runs/a runs/b runs/c runs/average --to dcvit --average",
            "dcvit convert runs/digits digits_hf --to hf --push OWNER/digits --private",
        ],
    )
    parser.add_argument(
        "sources", nargs="+", metavar="source", type=cli.local_model,
        help="a workdir, one of its checkpoints, weights (a file or folder), a model of the package, or hf:OWNER/NAME",
    )  # fmt: skip
    parser.add_argument("target", type=cli.utf8_path, help="a new folder")
    parser.add_argument(
        "--to", required=True,
        help="npz (big_vision), safetensors, hf (transformers), timm, onnx, stablehlo or dcvit",
    )  # fmt: skip
    parser.add_argument("--average", action="store_true", help="average the parameters of several sources")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the result to the Hugging Face Hub")
    parser.add_argument("--private", action="store_true", help="with --push: create a private repository")
    args, _ = parser.parse(argv)
    if len({*args.sources}) < len(args.sources):
        parser.error("a source is given twice")
    if args.average != (len(args.sources) > 1):
        parser.error(f"{len(args.sources)} source(s): --average averages two or more")
    if args.private and not args.push:
        parser.error("--private needs --push")

    from dcvit.hub import repository, soup
    from dcvit.hub.open import open_model
    from dcvit.hub.saved import as_weights
    from dcvit.parallel import runtime
    from dcvit.weights.export.conversion import convert

    place = repository.check_upload(args.push, args.to) if args.push else None
    runtime.configure()
    combine = soup.average if args.average else None
    report = convert(args.sources, args.target, args.to, lambda path: as_weights(open_model(path)), combine)
    print(f"{args.target}: {report}")
    if place:
        print(f"uploaded as {repository.upload(args.target, place, args.private)}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
