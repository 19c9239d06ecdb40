"""Tables and figures of the paper: `python scripts/paper --list`, or `TABLE [--scale desk|full] [--out DIR]`.

At scale "desk" everything runs here, on embedded data; at scale "full" the runs of the paper are printed as commands
with slices and estimated hours. DIR gets TABLE.md, TABLE.csv and, at scale "desk", mostly TABLE.png, with the paper's
numbers beside ours. Re-run the same command to resume interrupted training runs; complete ones are kept.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that this folder is the package `paper`

from paper import ablations, costs, downstream, full, in_context, scaling, table

from dcvit import cli
from dcvit.errors import ConfigError, escaped, nearest
from dcvit.parallel import runtime
from dcvit.runs.seeds import parse_seeds

# Table or figure: a phrase that says what scale "desk" computes, and the function that returns the `Table`. One that
# trains models first takes (folder, seeds, steps) and has a default number of steps and a name of the runs' folder.
ENTRIES: dict[str, tuple[str, Callable[..., table.Table], int | None, str | None]] = {
    "table2": ("extra parameters and FLOPs of DCMHA, by formula and counted", costs.table2, None, None),
    "table4": ("two models of figure4 on local downstream tasks", downstream.table4, scaling.STEPS, "figure4"),
    "table5": ("two small models on generated in-context tasks", in_context.table5, in_context.STEPS, "in_context"),
    "table6": ("FLOPs and cache of DCFormer++, which bound its speed", costs.table6, None, None),
    "table7": ("parameters and FLOPs of the ViTs, counted", costs.table7, None, None),
    "table8": ("ViT and DCViT on digits and scenes of digits", ablations.table8, ablations.IMAGE_STEPS, "table8"),
    "table9": ("12 small language models: DCMHA's components", ablations.table9, ablations.STEPS, "table9"),
    "table10": ("FLOPs and cache by windows and branches, which bound the speed", costs.table10, None, None),
    "table11": ("examples of the generated in-context tasks", in_context.table11, None, None),
    "figure3": ("scaling curves of 4 families of small models", scaling.figure3, scaling.STEPS, "figure3"),
    "figure4": ("scaling curves of 2 families of small models", scaling.figure4, scaling.STEPS, "figure4"),
    "figure5": ("diversity of the heads of table5's models", in_context.figure5, in_context.STEPS, "in_context"),
    "figure6": ("their accuracy by the number of shots", in_context.figure6, in_context.STEPS, "in_context"),
    "figure7": ("maps between heads in one of their answers", in_context.figure7, in_context.STEPS, "in_context"),
    "figure8": ("attention in that answer", in_context.figure8, in_context.STEPS, "in_context"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; see the module's docstring."""
    parser = cli.Parser(prog="scripts/paper", extra="train", description="Compute a table or figure of the paper.")
    parser.add_argument("name", nargs="?", metavar="TABLE", help="name of a table or figure; see --list")
    parser.add_argument("--list", action="store_true", help="list all tables and figures")
    parser.add_argument("--scale", choices=("desk", "full"), default="desk", help="here, or the runs of the paper")
    parser.add_argument("--out", type=cli.path, default=Path("runs/paper"), help="folder of tables and runs")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2], help="seeds, or their number (default 3)")
    parser.add_argument("--steps", type=int, help="steps of a training run, of the largest if they differ")
    args, _ = parser.parse(argv)
    if args.list:
        print("\n".join(f"{name:9}{phrase}" for name, (phrase, *_) in ENTRIES.items()))
        print(f"commands at scale full: {', '.join(full.RUNS)}")
        return 0
    if args.name is None:
        raise ConfigError("give the name of a table or figure, or --list")
    known = full.RUNS if args.scale == "full" else ENTRIES
    if args.name not in known:
        raise ConfigError(f"unknown table or figure at scale {args.scale}: {args.name!r}; {nearest(args.name, known)}")
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: expected 1 or more")
    runtime.configure()
    _, compute, steps, folder = ENTRIES[args.name]
    if args.scale == "full":
        found = full.table(args.name)
    elif steps is None:
        found = compute()
    else:
        found = compute(args.out / "runs" / folder, args.seeds, args.steps or steps)
    table.write(found, args.out)
    for line in table.markdown(found).splitlines():
        print(escaped(line))
    print(escaped(f"files: {args.out / found.name}.*"))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
