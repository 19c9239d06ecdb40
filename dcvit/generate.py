"""Generation: `python -m dcvit.generate --workdir DIR --prompt "def main" [--tokens 200] [--temperature 0.8] …`.

Continues a prompt with a trained language model and prints the prompt and the text while it is generated. Several
prompts form one batch, which is printed when it is complete. `--format json` also prints the number of tokens of each
text and the reason for its end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import ConfigError

# Control characters, which a terminal would execute, are replaced; a line feed and a tab are not.
CONTROLS = {i: "\ufffd" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def write(text: str) -> None:
    """Write text to stdout immediately; on a terminal, without control characters."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def make_parser() -> cli.Parser:
    """Build the parser of the command's options."""
    parser = cli.Parser(
        prog="dcvit generate",
        description="Continue text with a trained language model.",
        examples=['dcvit generate --workdir runs/text --prompt "def main(" --tokens 100'],
        conflict_handler="resolve",
    )
    cli.add_model_options(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="format of the output")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; several form a batch")
    parser.add_argument("--prompt_file", type=cli.path, action="append", default=[], help="file with text to continue")
    parser.add_argument(
        "--tokens", type=int, help="number of new tokens, within the context; by default 200, or as many as fit"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 selects the token of the highest logit; by default %(default)s",
    )
    parser.add_argument("--top_k", type=int, default=0, help="number of tokens to draw from; by default 0, for all")
    parser.add_argument(
        "--top_p", type=float, default=0.95, help="total probability of the tokens to draw from; by default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws; by default %(default)s")
    parser.add_argument("--stop", action="append", default=[], help="string that ends the text; may be repeated")
    parser.add_argument("--tokenizer", help="tokenizer.json, instead of the config's tokenizer")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    args, overrides = make_parser().parse(argv)
    if args.tokens is not None and args.tokens < 1:
        raise ConfigError(f"--tokens {args.tokens}: should be 1 or more")
    if not all(args.stop):
        raise ConfigError("--stop: an empty string would end every text before it begins")
    config = cli.check_model(args, overrides)

    from dcvit.inference.loading import open_model
    from dcvit.inference.sampling import Sampling
    from dcvit.inference.texts import LanguageModel, TextOptions, read_prompts

    options = TextOptions(args.tokens, Sampling(args.temperature, args.top_k, args.top_p), args.seed, args.stop)
    options.sampling.check()
    prompts = read_prompts(args.prompt, args.prompt_file)
    cli.start_jax(forward_only=True)
    model = open_model(LanguageModel, args.workdir, config, args.checkpoint, overrides)
    tokenizer = model.open_tokenizer(args.tokenizer)
    live = len(prompts) == 1 and args.format == "text"
    started = False  # the prompt is printed with the first piece of text, so that an error is printed alone

    def show(piece: str) -> None:
        nonlocal started
        if live:
            write(piece if started else prompts[0] + piece)
            started = True

    try:
        result = model.continue_texts(prompts, options, show, tokenizer)
    finally:
        if started:
            write("\n")
    if args.format == "json":
        print(json.dumps([text._asdict() for text in result.texts], indent=2))
    elif not live:
        for i, text in enumerate(result.texts, start=1):
            write(f"== {i} ==\n{text.prompt}{text.text}\n")
    speed = f", {result.tokens_per_second:.1f} tokens/s" if result.tokens_per_second else ""
    print(f"{result.tokens} tokens{speed}, context {result.positions} of {model.module.context}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
