"""Conversion: `python -m dcvit.convert SRC DST --to npz|bv|safetensors|hf|peft|timm|onnx|savedmodel|stablehlo|dcvit`.

SRC is a workdir, one of its checkpoints, or weights of another library; DST is a new folder. The command ends with a
comparison of the logits of both sides on real inputs, and prints the largest difference. If the logits differ, or
anything else fails, nothing is left at DST. A temporary folder beside DST that a killed process left is removed when
the command runs again.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from dcvit import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit convert",
        description="Convert a model to the format of another library, or from one.",
        examples=[
            "dcvit convert runs/digits digits_hf --to hf",
            "dcvit convert gpt2/ runs/gpt2 --to dcvit",
        ],
    )
    parser.add_argument(
        "source", type=cli.local_model,
        help="a workdir, one of its checkpoints, weights (a file or folder), or the name of a model of the package",
    )  # fmt: skip
    parser.add_argument("target", type=cli.utf8_path, help="a new folder")
    parser.add_argument(
        "--to", required=True,
        help="npz, bv (big_vision), safetensors, hf (transformers), peft, timm, onnx, savedmodel, stablehlo or dcvit",
    )  # fmt: skip
    args = parser.parse_without_config(argv)

    from dcvit.hub.saved import open_saved
    from dcvit.parallel import runtime
    from dcvit.weights.export.conversion import convert

    runtime.configure()
    # By default, these signals would leave a temporary folder. SIGHUP is ignored under `nohup`.
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _exit) for number in signals}
    try:
        print(f"{args.target}: {convert(args.source, args.target, args.to, open_saved)}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _exit(number: int, _: object) -> NoReturn:
    """Handle a signal: exit with status 128 + `number`; ignore further signals, so that files are removed."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(cli.run(main))
