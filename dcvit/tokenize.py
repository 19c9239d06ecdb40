"""Tokenising once: `python -m dcvit.tokenize --data PATH --tokenizer tokenizer.json --out PREFIX`.

Reads .txt, .jsonl and .jsonl.zst and writes PREFIX.bin and PREFIX.idx for `kind="megatron"`, one sequence a document,
with its end of text; and PREFIX.json, which says what the tokens are. A run that fails leaves none of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dcvit import cli
from dcvit.errors import ConfigError
from input_pipeline.text.documents import encoded, find_files, read_documents
from input_pipeline.text.megatron import Writer
from input_pipeline.text.tokenizer import END_OF_TEXT, FileTokenizer, end_token, open_tokenizer

LINE_SECONDS = 10.0  # between lines of progress where there is no terminal


class Bar:
    """Bytes read so far: a live bar with ETA on a terminal, a plain line now and then elsewhere. A context manager."""

    def __init__(self, title: str, total: int):
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.live, self.title, self.total = self.console.is_terminal, title, total
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=self.console, disable=not self.live,
        )  # fmt: skip
        self.task = self.bar.add_task(title, total=total, status="")
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, read: int, tokens: int) -> None:
        """Shows so many bytes and tokens."""
        now = time.monotonic()
        if now < self.shown + (0.2 if self.live else LINE_SECONDS):
            return
        self.shown, seconds = now, now - self.start
        status = f"{tokens / seconds / 1e6:.2f} Mtok/s"
        self.bar.update(self.task, completed=read, status=status)
        if not self.live:
            left = seconds * (self.total - read) / max(1, read)
            done = f"{read / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
            self.console.print(f"{self.title}: {done}  {status}  ETA {left:.0f}s", markup=False)


def tokenize(data: str, tokenizer: str | None, out: str, *, key: str, end_of_text: str) -> dict[str, Any]:
    """Writes the documents of `data` as tokens; returns what PREFIX.json says.

    Raises:
      InputError: unusable data or tokenizer, a file that is there already, or one that cannot be written.
    """
    opened = open_tokenizer(tokenizer, end_of_text)
    files = find_files(data)
    end = np.array([end_token(opened)])
    source = str(Path(opened.path).resolve()) if isinstance(opened, FileTokenizer) else None
    about = {"tokenizer": source, "bytes": 0}
    with Writer(out, opened.vocab_size, end_token(opened), about) as writer, Bar("tokenising", files.nbytes) as bar:
        for document, (tokens,) in encoded(read_documents(files, (key,)), opened):
            writer.add(np.concatenate([tokens, end]))
            writer.about["bytes"] += len(document.texts[0].encode())
            bar.update(document.read, writer.tokens)
    return {**writer.about, "documents": len(writer.sizes), "tokens": writer.tokens}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit tokenize", description="Turn text files into files of tokens, once.")
    parser.add_argument(
        "--data", type=cli.path, required=True, help="a file, folder or glob of .txt, .jsonl, .jsonl.zst"
    )
    parser.add_argument(
        "--tokenizer", type=cli.path, help="a tokenizer.json, or its folder; by default tokens are bytes"
    )
    parser.add_argument("--out", type=cli.path, required=True, help="path of the files without .bin, .idx and .json")
    parser.add_argument("--key", default="text", help="where the text is in a line's JSON object")
    parser.add_argument("--end-of-text", default=END_OF_TEXT, help="the tokenizer's special token that ends a document")
    args, rest = parser.parse(argv)
    if rest:
        raise ConfigError(f"tokenize takes no --config.{rest[0]}")
    start = time.monotonic()
    tokenizer = None if args.tokenizer is None else str(args.tokenizer)
    about = tokenize(str(args.data), tokenizer, str(args.out), key=args.key, end_of_text=args.end_of_text)
    seconds = time.monotonic() - start
    print(f"{about['documents']:,} documents, {about['bytes']:,} bytes of text, {about['tokens']:,} tokens", end="")
    print(f" in {seconds:.1f} s ({about['tokens'] / seconds:,.0f} tokens/s)")
    print(f"vocab_size {about['vocab_size']}, end_of_text {about['end_of_text']}")
    print(f'wrote {args.out}.bin, .idx and .json; read them with kind="megatron", path="{args.out}"')
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
