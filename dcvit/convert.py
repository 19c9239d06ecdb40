"""Conversion: `python -m dcvit.convert SRC … DST --to npz|safetensors|hf|timm|onnx|stablehlo|dcvit`.

SRC is a workdir, one of its checkpoints, or weights of another library; DST is a new folder. The command ends with a
comparison of the logits of both sides on real inputs, and prints the largest difference. If the logits differ, or
anything else fails, nothing is left at DST. A temporary folder beside DST that a killed process left is removed when
the command runs again.

With `--soup`, several models SRC of the same architecture are averaged to one (`dcvit.hub.soup`).

`--push OWNER/NAME` uploads DST to a repository of the Hugging Face Hub, in one commit. If the upload fails, DST stays,
and the same command uploads it again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from dcvit import cli
from dcvit.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit convert",
        description="Convert a model to the format of another library, or from one.",
        examples=[
            "dcvit convert runs/digits digits_hf --to hf",
            "dcvit convert hf:openai-community/gpt2 runs/gpt2 --to dcvit",
            "dcvit convert runs/a runs/b runs/c runs/soup --to dcvit --soup greedy --metric val/top1 max",
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
    parser.add_argument(
        "--soup", choices=("uniform", "greedy"),
        help="average several sources: all of them, or those that do not make --metric of the average worse",
    )  # fmt: skip
    parser.add_argument(
        "--metric", nargs=2, metavar=("NAME/METRIC", "max|min"),
        help="metric of an evaluator in the config of the first source, and which of its values is best",
    )  # fmt: skip
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the result to the Hugging Face Hub")
    parser.add_argument("--private", action="store_true", help="with --push: create a private repository")
    args = parser.parse_without_config(argv)
    _check_soup(parser, args)
    if args.private and not args.push:
        raise ConfigError("--private needs --push")

    from dcvit.hub import repository, soup
    from dcvit.hub.saved import open_saved
    from dcvit.parallel import runtime
    from dcvit.weights.export.conversion import convert

    place = repository.check_upload(args.push, args.to) if args.push else None
    runtime.configure()
    # By default, these signals would leave a temporary folder. SIGHUP is ignored under `nohup`.
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _exit) for number in signals}
    try:
        combine = {None: None, "uniform": soup.average, "greedy": lambda models: soup.greedy(models, *args.metric)}
        report = convert(args.sources, args.target, args.to, open_saved, combine[args.soup], again=bool(place))
        print(f"{args.target}: {report}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if place:
        print(f"uploaded as {repository.upload(args.target, place, args.private)}")
    return 0


def _check_soup(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Raise ConfigError if the options of an average do not fit each other and the number of sources."""
    if (args.soup is not None) != (len(args.sources) > 1):
        parser.error(
            f"--soup {args.soup} averages two sources or more, found {args.sources[0]} only" if args.soup
            else f"{len(args.sources)} sources: --soup uniform or greedy averages them"
        )  # fmt: skip
    if twice := {source for source in args.sources if args.sources.count(source) > 1}:
        parser.error(f"{min(twice)} is given twice")
    if (args.soup == "greedy") != (args.metric is not None):
        parser.error("--soup greedy and --metric NAME/METRIC max|min are given together, or neither")
    if args.metric and args.metric[1] not in ("max", "min"):
        parser.error(f"--metric {' '.join(args.metric)}: expected max or min after the name")


def _exit(number: int, _: object) -> NoReturn:
    """Handle a signal: exit with status 128 + `number`; ignore further signals, so that files are removed."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(cli.run(main))
