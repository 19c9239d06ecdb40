"""Check of the kernels of attention on this machine: `python -m dcvit.check_kernels [WORD …] [--config CONFIG]`.

For each case, every implementation of the platform is compiled and run in a process of its own, forward and backward,
and compared with the reference in float32. The verdicts are kept (`dcvit.dcmha.check`): programs use the fastest
implementation that passed. The cases are those of ViT-S/16, of language models, of decoding, and less usual ones; with
--config, those of a config's training step and evaluators on this machine.

The exit status is 1 if a kernel is wrong, fails or times out. `--again` also checks kernels that have a verdict.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dcvit import cli
from dcvit.errors import ConfigError, escaped

if TYPE_CHECKING:
    from dcvit.dcmha.check import Verdict

LOG = logging.getLogger(__name__)
ALL = ("q1", "q2", "qg", "k1", "k2", "kg")


class Sizes(NamedTuple):
    """Sizes and options of a call of attention, with the branches of both composes; see `dcvit.dcmha.attention`."""

    queries: int
    heads: int
    head_dim: int
    batch: int = 1
    keys: int | None = None
    key_heads: int | None = None
    dtype: str = "bfloat16"
    pre: tuple[str, ...] = ALL
    post: tuple[str, ...] = ALL
    rank: int = 2
    groups: int = 1
    causal: bool = False
    window: int | None = None
    compose_window: int | None = None
    mask: bool = False
    segments: bool = False

    def call(self) -> dict[str, Mapping[str, object]]:
        """Return the arrays and the options of the call, as `dcvit.dcmha.check.Case` has them."""
        batch, keys, per_group = self.batch, self.keys or self.queries, self.heads // self.groups
        kv = (self.dtype, (batch, keys, self.key_heads or self.heads, self.head_dim))
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {"k": kv, "v": kv}
        arrays["q"] = (self.dtype, (batch, self.queries, self.heads, self.head_dim))
        for compose, names in (("pre", self.pre), ("post", self.post)):
            for name in names:
                tokens, rank = self.queries if name[0] == "q" else keys, () if name[1] == "g" else (self.rank,)
                static = (self.groups, per_group, per_group)
                shape = static if name == "static" else (batch, tokens, *rank, self.heads)
                arrays[f"{compose}.{name}"] = (self.dtype, shape)
        if self.mask:
            arrays["mask"] = ("bool", (batch, 1, self.queries, keys))
        if self.segments:
            arrays |= {f"segments.{s}": ("int32", (batch, n)) for s, n in (("queries", self.queries), ("keys", keys))}
        options = {"causal": self.causal, "window": self.window, "groups": self.groups, "scale": self.head_dim**-0.5}
        options["compose_window"] = self.compose_window
        return {"arrays": arrays, "options": options}


VIT = Sizes(196, 6, 64, batch=8)
CASES = {
    "ViT-S/16": VIT,
    "ViT-S/16, batch 6": VIT._replace(batch=6),
    "ViT-S/16, float32": VIT._replace(dtype="float32"),
    "ViT-S/16 with a class token": VIT._replace(queries=197),
    "ViT-S/16, plain": VIT._replace(pre=(), post=()),
    "405M": Sizes(2048, 16, 64, causal=True),
    "405M, window": Sizes(2048, 16, 64, window=256),
    "405M, composed window": Sizes(2048, 16, 64, causal=True, compose_window=256),
    "405M, plain": Sizes(2048, 16, 64, causal=True, pre=(), post=()),
    "2.8B": Sizes(2048, 32, 80, causal=True),
    "2.8B, window": Sizes(2048, 32, 80, window=256),
    "6.9B": Sizes(2048, 32, 128, causal=True),
    "grouped queries": Sizes(300, 8, 64, key_heads=2, batch=2, causal=True),
    "mask": Sizes(100, 4, 32, keys=333, batch=2, mask=True),
    "documents": Sizes(2048, 16, 64, causal=True, segments=True),
    "head groups": Sizes(128, 8, 64, batch=2, groups=2),
    "key-wise only": Sizes(256, 8, 64, pre=ALL[3:], post=ALL[3:], causal=True),
    "query-wise only": Sizes(512, 8, 64, pre=ALL[:3], post=ALL[:3], causal=True),
    "gates only": Sizes(256, 8, 64, pre=("qg", "kg"), post=("qg", "kg")),
    "pre only": Sizes(256, 8, 64, post=(), causal=True),
    "static": Sizes(256, 8, 64, pre=(*ALL, "static"), post=(*ALL, "static")),
    "rank 3": Sizes(256, 8, 64, rank=3),
    "decoding": Sizes(1, 16, 64, keys=2048, batch=8),
}


def plan_calls() -> None:
    """Read calls of attention by name from stdin; print environment, cases and refused backends, or an error."""
    import jax

    from dcvit.dcmha import check, plan
    from dcvit.parallel import runtime

    runtime.configure()
    try:
        runtime.check_devices()
    except ConfigError as e:
        print(json.dumps({"error": str(e)}))
        return
    cases, unsupported = [], {}
    for name, given in json.load(sys.stdin).items():

        def find(
            arrays: Mapping[str, jax.Array], name: str = name, options: Mapping[str, object] = given["options"]
        ) -> None:
            traced = check.call_of(arrays, options)
            names, unsupported[name] = plan.candidates(traced)
            if any(plan.BACKENDS[each].is_kernel for each in names):
                cases.append(plan.make_case(names, traced)._replace(label=name))

        arrays = {key: jax.ShapeDtypeStruct(tuple(shape), dtype) for key, (dtype, shape) in given["arrays"].items()}
        with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])):
            jax.eval_shape(find, arrays)
    print(json.dumps([check.environment(jax.local_devices()[0]), cases, unsupported]))


def row(case: str, name: str, verdict: Verdict, *, is_best: bool = False) -> dict[str, str]:
    """Return the row of the table for one implementation in one case."""
    numbers = {"error": ".1e", "ms": ".3f"}
    cells = {key: "" if (number := verdict.get(key)) is None else format(number, f) for key, f in numbers.items()}
    status = "fastest" if is_best else verdict["status"]
    return {"case": case, "implementation": name, **cells, "verdict": status, "reason": verdict["reason"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit check-kernels",
        examples=["dcvit check-kernels", "dcvit check-kernels vit 405M --json", "dcvit check-kernels --config vit_i1k"],
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases whose names contain one of these")
    parser.add_argument("--config", help="check the calls of attention in this config's training step and evaluators")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--again", action="store_true", help="check again what has a verdict")
    args, overrides = parser.parse(argv)
    if args.config:
        cli.check_config(args.config, overrides)
    chosen = {n: s for n, s in CASES.items() if not args.words or any(w.lower() in n.lower() for w in args.words)}
    if not chosen:
        raise ConfigError(f"no case contains {' or '.join(args.words)}; there are {', '.join(CASES)}")

    from dcvit.dcmha import check, plan

    plan.default_policy()  # an invalid environment variable is an error
    request: object = {name: sizes.call() for name, sizes in chosen.items()}
    listing = "from dcvit.check_kernels import plan_calls; plan_calls()"
    if args.config:
        listing = "from dcvit.training.kernels import main; main()"
        request = {"config": args.config, "overrides": overrides}
    try:
        listed = check.run_child(listing, request, check.SECONDS)
    except check.ChildError as e:
        raise ConfigError(f"cannot find the calls of attention: {e}") from None
    if isinstance(listed, dict):
        raise ConfigError(listed["error"])
    environment, cases, *unsupported = listed
    if args.again:
        check.path(environment).unlink(missing_ok=True)
    rows = []
    for name, reasons in unsupported[0].items() if unsupported else ():
        rows += [row(name, each, check.Verdict(status="unsupported", reason=text)) for each, text in reasons.items()]
    for number, case in enumerate([check.Case(*fields) for fields in cases], 1):
        LOG.info("case %d of %d: %s", number, len(cases), case.label)
        verdicts = check.examine(case, environment)
        best = check.fastest(case, verdicts)
        rows += [row(case.label, name, verdict, is_best=name == best) for name, verdict in verdicts.items()]
    title = ", ".join(f"{key} {value}" for key, value in environment.items())
    cli.show(rows, "json" if args.json else "table", title=title)
    if not args.json:
        print(escaped(f"{len(cases)} cases with kernels; verdicts: {check.path(environment)}"))
    return int(any(row["verdict"] in check.BAD and row["implementation"].startswith("pallas") for row in rows))


if __name__ == "__main__":
    sys.exit(cli.run(main))
