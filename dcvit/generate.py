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

# Control characters, which a terminal would execute, are replaced; a line feed and a tab are not.
CONTROLS = {i: "\ufffd" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def write(text: str) -> None:
    """Write text to stdout immediately; on a terminal, without control characters."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def make_parser() -> cli.Parser:
    """Build the parser of the command's options."""
    parser = cli.Parser(
        "dcvit generate",
        examples=['dcvit generate --workdir runs/text --prompt "def main(" --tokens 100'],
        conflict_handler="resolve",
    )
    cli.add_model_options(parser)
    add, limit = parser.add_argument, "within the context; by default 200, or as many as fit"
    add("--format", choices=("text", "json"), default="text", help="format of the output")
    add("--prompt", action="append", default=[], help="text to continue; several form a batch")
    add("--prompt_file", type=cli.path, action="append", default=[], help="file with text to continue")
    add("--tokens", type=cli.at_least(1), help=f"number of new tokens, {limit}")
    add("--temperature", type=float, default=0.8, help="0 selects the highest logit; by default %(default)s")
    add("--top_k", type=int, default=0, help="number of tokens to draw from; by default 0, for all")
    add("--top_p", type=float, default=0.95, help="their total probability; by default %(default)s")
    add("--seed", type=int, default=0, help="seed of the random draws; by default %(default)s")
    add("--stop", action="append", default=[], help="string that ends the text; may be repeated")
    add("--tokenizer", help="tokenizer.json, instead of the config's tokenizer")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    args, overrides = make_parser().parse(argv)
    config = cli.check_model(args, overrides)

    from dcvit.inference.sampling import Sampling
    from dcvit.inference.texts import LanguageModel, TextOptions, read_prompts

    options = TextOptions(args.tokens, Sampling(args.temperature, args.top_k, args.top_p), args.seed, args.stop)
    options.check()
    prompts = read_prompts(args.prompt, args.prompt_file)
    cli.start_jax()
    model = LanguageModel.of(cli.open_model(args, config, overrides))
    live = len(prompts) == 1 and args.format == "text"
    shown: list[str] = []

    def show(piece: str) -> None:
        if live:
            write(piece if shown else prompts[0] + piece)  # not before, so that an error is printed alone
            shown.append(piece)

    try:
        result = model.continue_texts(prompts, options, show, model.open_tokenizer(args.tokenizer))
    finally:
        if shown:
            write("\n")
    if args.format == "json":
        print(json.dumps([text._asdict() for text in result.texts], indent=2))
    elif not live:
        for i, text in enumerate(result.texts, start=1):
            write(f"== {i} ==\n{text.prompt}{text.text}\n")
    speed = f", {result.tokens_per_second:.1f} tokens/s" if result.tokens_per_second else ""
    print(f"{result.tokens} tokens{speed}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
