"""Command that converts text files to files of tokens.

    python -m dcvit.tokenize --data PATH --tokenizer tokenizer.json --out PREFIX

The command reads .txt, .jsonl, .jsonl.zst and .parquet files. It writes PREFIX.bin and PREFIX.idx, which
`kind="megatron"` reads, with one sequence per document that ends with the end of text, and PREFIX.json, which describes
the tokens. If it fails, it leaves none of these files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import escaped
from dcvit.runs.progress import Progress
from input_pipeline.text.megatron import tokenize_files
from input_pipeline.text.tokenizer import END_OF_TEXT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the module's docstring describes it."""
    parser = cli.Parser(
        "dcvit tokenize",
        examples=["dcvit tokenize --data text/ --tokenizer tokenizer.json --out tokens/all"],
    )
    parser.add_argument(
        "--data",
        type=cli.path,
        required=True,
        help="file, folder or glob of .txt, .jsonl, .jsonl.zst or .parquet files",
    )
    parser.add_argument(
        "--tokenizer", type=cli.path, help="tokenizer.json or its folder; by default, tokens are UTF-8 bytes"
    )
    parser.add_argument("--out", type=cli.path, required=True, help="path of the files to write, without suffix")
    parser.add_argument("--key", default="text", help="key of the text in the JSON object of a line")
    parser.add_argument("--end-of-text", default=END_OF_TEXT, help="the tokenizer's special token that ends a document")
    args, _ = parser.parse(argv)
    start = time.monotonic()
    progress = Progress("tokenizing", in_bytes=True)

    def show(read: int, total: int, tokens: int) -> None:
        progress.show(read, total, f"{tokens / (time.monotonic() - start) / 1e6:.2f} Mtok/s")

    tokenizer = None if args.tokenizer is None else str(args.tokenizer)
    options = {"key": args.key, "end_of_text": args.end_of_text}
    description = tokenize_files(str(args.data), tokenizer, str(args.out), **options, on_progress=show)
    seconds, tokens = time.monotonic() - start, description["tokens"]
    print(
        f"{description['documents']:,} documents, {description['bytes']:,} bytes of text, {tokens:,} tokens"
        f" in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s)"
    )
    print(f"vocab_size {description['vocab_size']}, end_of_text {description['end_of_text']}")
    print(escaped(f'wrote {args.out}.bin, .idx and .json; read them with kind="megatron", path="{args.out}"'))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
