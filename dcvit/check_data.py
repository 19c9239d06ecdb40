"""Search for damaged data: `dcvit check-data --config CONFIG[:argument=value,…] [--config.KEY=VALUE …]`.

Reads every example of the training data and of all evaluations of a config once, decodes images completely, checks
labels, and lists the damaged examples with their file and the reason. Text is read up to the first damaged line. With
`--statistics`, it also prints mean, standard deviation and range of each channel of the training images, over all
pixels as they are decoded, and a `vgg_value_range` with them. Exit status: 0 no example is damaged; 1 some are; 2 the
config is invalid, data is missing, or text is damaged.

`--picture FILE.png` reads only the first batch of training, and draws its first images with their labels, exactly as
the model gets them: after preprocessing, random erasing, mixup and cutmix. Only the range of values is undone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from dcvit import cli
from dcvit.errors import ConfigError, escaped


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit check-data",
        examples=[
            "dcvit check-data --config vit_folder:data_dir=pets",
            "dcvit check-data --config vit_digits --statistics",
            "dcvit check-data --config vit_folder:data_dir=pets --picture inputs.png",
        ],
    )
    parser.add_argument("--config", required=True, help="config file or bare name, with :argument=value,…")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--statistics", action="store_true", help="print the statistics of each channel of the training images"
    )
    text = "only draw images of the first training step, after all augmentations, with their labels"
    choice.add_argument("--picture", type=cli.path, metavar="FILE.png", help=text)
    args, overrides = parser.parse(argv)

    from dcvit.config import load as configs

    config = configs.load(args.config, overrides)  # before JAX is imported, so that an error is shown at once

    if (args.statistics or args.picture) and config.model_name != "vit":
        option = "--picture" if args.picture else "--statistics"
        raise ConfigError(f"{option} is for images; config.model_name={config.model_name!r}")
    if args.picture:
        return _draw(config, args.picture)
    from dcvit.runs.progress import Progress
    from dcvit.training.inputs import all_inputs
    from input_pipeline import MissingDataError
    from input_pipeline.check import check_data, value_range

    reports, listed = [], set[str]()  # inputs may read the same files
    for name, data, pp, optional in all_inputs(config):
        try:
            report = check_data(data, pp, Progress(name).show, args.statistics and name == "config.input.data")
        except MissingDataError as e:
            if not optional:
                raise
            print(escaped(f"{name}: skipped, {e}"))
            continue
        lines = [escaped(f"{damage.location}: {damage.reason}") for damage in report.damaged]
        print("".join(f"{line}\n" for line in lines if line not in listed), end="")
        listed |= {*lines}
        reports.append((name, report))
    for name, report in reports:
        print(f"{name}: {report.checked:,} read, {len(report.damaged):,} damaged")
    for channels in (report.channels for _, report in reports if report.channels):
        print(f"{'channel':>7} {'mean':>12} {'std':>12} {'min':>12} {'max':>12}")
        for number, channel in enumerate(channels):
            print(f"{number:7} " + " ".join(f"{value:12.7g}" for value in channel))
        if constant := [number for number, channel in enumerate(channels) if not channel.std]:
            print(f"constant: {', '.join(map(str, constant))}, for which 1 stands below instead of 0")
        print(value_range(channels))
    return int(any(report.damaged for _, report in reports))


def _draw(config: ConfigDict, file: Path) -> int:
    """Write the picture of `--picture`, print a line about it, and return the exit status."""
    from dcvit.pages.html import check_path
    from dcvit.training.picture import draw_inputs
    from dcvit.training.setup import make_setup

    check_path(file, "--picture", (".png",))
    cli.start_jax()
    picture, about = draw_inputs(make_setup(config, evaluate=False))
    picture.save(file)
    print(escaped(f"{file}: {about}"))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
