"""Generation: `python -m dcvit.generate --workdir DIR --prompt "def main" [--tokens 200] [--temperature 0.8] …`.

Continues a prompt with a trained language model and shows prompt and text while it comes. Several prompts are one
batch, shown when all of it is done; `--format json` says for each how long its text is and why it ended.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dcvit import cli
from dcvit.errors import ConfigError
from dcvit.evaluate import add_options
from dcvit.inference.generation import Sampling, TextStream, generate
from dcvit.training.trained import open_trained
from input_pipeline import InputError

TOKENS = 200
CONTROLS = {i: "\ufffd" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def read_prompts(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The given texts, then the contents of the given files.

    Raises:
      ConfigError: neither is given, or a text is not Unicode.
      InputError: a file's is not.
    """
    if not texts and not files:
        raise ConfigError('give --prompt TEXT or --prompt_file FILE; --prompt "" begins with an end-of-text token')
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--prompt {text!r} is not valid UTF-8") from None
    prompts = list(texts)
    for file in files:
        try:
            prompts.append(file.read_bytes().decode())
        except OSError as e:
            raise InputError(f"cannot read {file}: {e.strerror}") from None
        except UnicodeDecodeError as e:
            raise InputError(f"{file} is not UTF-8: {e.reason} at byte {e.start}") from None
    return prompts


def continue_texts(
    net: Any,
    params: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    tokens: int | None,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str],
    show: Callable[[str], Any],
) -> tuple[list[dict[str, Any]], str]:
    """A row of prompt, text, number of tokens and reason to end for each prompt, and a line about the whole.

    `tokens` is the most that an example gets; None: TOKENS, or what the context leaves. `show` gets the pieces of
    the first prompt's text as they come. The speed is that after the first token, so without any compilation.
    """
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    end = net.end_of_text if tokenizer.end_of_text is None else tokenizer.end_of_text
    longest = max(1, *map(len, encoded)) if encoded else 1
    tokens = max(1, min(TOKENS, net.context - longest)) if tokens is None else tokens
    streams = [TextStream(tokenizer.decode, stop, after=ids) for ids in encoded]
    texts, counts = ["" for _ in prompts], [0 for _ in prompts]

    def add(i: int, piece: str) -> None:
        texts[i] += piece
        if i == 0:
            show(piece)

    first, clock = 0, 0.0  # tokens of the first step, and when it was done
    for step in generate(
        net, params, encoded, max_tokens=tokens, sampling=sampling, seed=seed, stop=() if end is None else (end,),
        begin=end, vocab_size=min(tokenizer.vocab_size, net.vocab_size),
    ):  # fmt: skip
        for i, token in enumerate(step):
            if token is not None and not streams[i].stopped:
                counts[i] += 1
                add(i, streams[i].push(token))
        if not clock:
            first, clock = sum(counts), time.perf_counter()
        if all(token is None or stream.stopped for token, stream in zip(step, streams, strict=True)):
            break
    seconds = time.perf_counter() - clock
    rows: list[dict[str, Any]] = []
    for i, stream in enumerate(streams):
        add(i, stream.rest())
        reason = "stop" if stream.stopped else "length" if counts[i] == tokens else "end_of_text"
        rows.append({"prompt": prompts[i], "text": texts[i], "tokens": counts[i], "ended": reason})
    timed = sum(counts) - first
    speed = f", {timed / seconds:.1f} tokens/s" if timed else ""
    used = max(max(1, len(ids)) + count for ids, count in zip(encoded, counts, strict=True))
    return rows, f"{sum(counts)} tokens{speed}, context {used} of {net.context}"


def write(text: str) -> None:
    """Shows a piece of text at once; a terminal is spared what would move its cursor or worse."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit generate", description="Continue text with a trained language model.", conflict_handler="resolve"
    )
    add_options(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; repeated: a batch")
    parser.add_argument("--prompt_file", type=cli.path, action="append", default=[], help="file whose text to continue")
    parser.add_argument("--tokens", type=int, help=f"most new tokens; by default {TOKENS}, if the context allows")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the distribution; 0: the likeliest token")
    parser.add_argument("--top_k", type=int, default=0, help="draw from so many likeliest tokens; 0: from all")
    parser.add_argument("--top_p", type=float, default=0.95, help="draw from the likeliest tokens of this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="text before which to end; may be repeated")
    parser.add_argument("--tokenizer", help="the tokenizer, instead of the config's own")
    args, overrides = parser.parse(argv)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    sampling.check()
    if args.tokens is not None and args.tokens < 1:
        raise ConfigError(f"--tokens {args.tokens}: should be 1 or more")
    if not all(args.stop):
        raise ConfigError("--stop: an empty text would end everything before it begins")
    prompts = read_prompts(args.prompt, args.prompt_file)
    trained = open_trained(args.workdir, args.config, args.checkpoint, overrides)
    tokenizer = trained.tokenizer(args.tokenizer)
    net, params = trained.language_model()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that is not Unicode
    live = len(prompts) == 1 and args.format == "text"
    begun = False  # nothing is shown before the first piece: an error has the screen for itself

    def show(piece: str) -> None:
        nonlocal begun
        if live:
            write(piece if begun else prompts[0] + piece)
            begun = True

    try:
        rows, line = continue_texts(
            net, params, tokenizer, prompts, tokens=args.tokens, sampling=sampling, seed=args.seed, stop=args.stop,
            show=show,
        )  # fmt: skip
    finally:
        if begun:
            write("\n")
    if args.format == "json":
        print(json.dumps(rows, indent=2))
    elif not live:
        for i, row in enumerate(rows, start=1):
            write(f"== {i} ==\n{row['prompt']}{row['text']}\n")
    print(line, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
