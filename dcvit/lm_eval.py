"""Language model benchmarks: `python -m dcvit.lm_eval --workdir DIR --tasks lambada_openai,piqa [--num_fewshot 0] …`.

Runs tasks of lm-evaluation-harness (the `eval` extra) on a trained language model and prints a row for each task and
metric. Data comes from the local cache, unless `--online` is given. `--include_path DIR` adds the task files of a
folder, which may run code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dcvit import cli
from dcvit.errors import ConfigError
from input_pipeline.optional import require_extra

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


def prepare(online: bool) -> None:
    """Set the variables that the harness and its libraries read when they are imported: `online` allows downloads."""
    require_extra("eval")
    os.environ["DISABLE_MULTIPROC"] = "1"  # a process with JAX's threads should not fork
    if not online:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit lm_eval",
        examples=["dcvit lm_eval --workdir runs/text --tasks lambada_openai,piqa"],
    )
    cli.add_model_options(parser)
    add, count = parser.add_argument, cli.at_least(1)
    add("--tasks", required=True, help="comma-separated names of tasks, groups or tags")
    add("--num_fewshot", type=cli.at_least(0), help="examples before each question; by default the tasks decide")
    add("--limit", type=count, help="maximum number of questions of each task, for a quick test")
    add("--batch_size", type=count, default=8, help="rows of a batch, over all devices")
    add("--include_path", type=cli.path, help="folder of further task files (YAML), which may run code")
    add("--online", action="store_true", help="download data that is not in the local cache")
    add("--tokenizer", help="tokenizer.json, instead of the config's tokenizer")
    args, overrides = parser.parse(argv)
    if args.include_path and not args.include_path.is_dir():
        raise ConfigError(f"--include_path: no folder {args.include_path}")
    config = cli.check_model(args, overrides)
    cli.start_jax()
    prepare(args.online)
    from dcvit.inference import harness  # imports lm_eval, which reads the variables of `prepare`
    from dcvit.inference.texts import LanguageModel

    model = LanguageModel.of(cli.open_model(args, config, overrides))
    adapter = harness.HarnessModel(model, model.open_tokenizer(args.tokenizer), args.batch_size)
    options = {"num_fewshot": args.num_fewshot, "limit": args.limit}
    results = harness.evaluate_tasks(adapter, args.tasks.split(","), args.include_path, **options)
    cli.show(harness.table_rows(results), args.format)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
