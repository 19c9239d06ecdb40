"""Language model benchmarks: `python -m dcvit.lm_eval --workdir DIR --tasks lambada_openai,piqa [--num_fewshot 0] …`.

Runs tasks of lm-evaluation-harness (the `eval` extra) on a trained language model and prints a row for each task and
metric. Data comes from the local cache, unless `--online` is given. `--include_path DIR` adds the task files of a
folder, which may run code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit lm_eval",
        description="Run tasks of lm-evaluation-harness on a language model.",
        examples=["dcvit lm_eval --workdir runs/text --tasks lambada_openai,piqa"],
    )
    cli.add_model_options(parser)
    parser.add_argument("--tasks", required=True, help="comma-separated names of tasks, groups or tags")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question; by default the tasks decide")
    parser.add_argument("--limit", type=int, help="maximum number of questions of each task, for a quick test")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a batch, over all devices")
    parser.add_argument("--include_path", type=cli.path, help="folder of further task files (YAML), which may run code")
    parser.add_argument("--online", action="store_true", help="download data that is not in the local cache")
    parser.add_argument("--tokenizer", help="tokenizer.json, instead of the config's tokenizer")
    args, overrides = parser.parse(argv)
    for name, minimum in (("num_fewshot", 0), ("limit", 1), ("batch_size", 1)):
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name} {value}: should be {minimum} or more")
    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    if not names:
        raise ConfigError("--tasks names no task")
    if args.include_path and not args.include_path.is_dir():
        raise ConfigError(f"--include_path: no folder {args.include_path}")
    cli.check_model(args, overrides)

    from dcvit.inference import harness_tasks
    from dcvit.inference.loading import open_model
    from dcvit.inference.texts import LanguageModel

    cli.start_jax(forward_only=True)
    harness_tasks.prepare(args.online)
    from dcvit.inference.harness import HarnessModel  # imports lm_eval, which reads the variables of `prepare`

    def make_model() -> HarnessModel:  # after the tasks are loaded
        model = open_model(LanguageModel, args.workdir, args.config, args.checkpoint, overrides)
        return HarnessModel(
            model.module, model.params, model.open_tokenizer(args.tokenizer), end_tokens=model.end_tokens,
            batch_size=args.batch_size,
        )  # fmt: skip

    results = harness_tasks.evaluate_tasks(
        make_model, names, include_path=args.include_path, num_fewshot=args.num_fewshot, limit=args.limit
    )
    cli.show(harness_tasks.table_rows(results), args.format)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
