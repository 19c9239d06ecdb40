"""Check of the kernels of attention on this machine: `python -m dcvit.check_kernels [WORD …] [--config CONFIG]`.

For each case, every implementation of the platform is compiled and run in a process of its own, forward and backward,
and compared with the reference in float32. The verdicts are kept (`dcvit.dcmha.check`): programs use the fastest
implementation that passed. The cases are those of ViT-S/16, of language models, of decoding, and less usual ones; with
--config, those of a config's training step and evaluators on this machine.

The exit status is 1 if a kernel is wrong, fails or times out. `--again` also checks kernels that have a verdict.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dcvit import cli
from dcvit.errors import ConfigError, escaped

if TYPE_CHECKING:
    from dcvit.dcmha.check import Verdict

Sizes: TypeAlias = Mapping[str, Any]
Array: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and shape
ALL = ("q1", "q2", "qg", "k1", "k2", "kg")
VIT = {"queries": 196, "heads": 6, "head_dim": 64, "batch": 8}
# Name -> arguments of `call`.
CASES: dict[str, Sizes] = {
    "ViT-S/16": VIT,
    "ViT-S/16, batch 6": VIT | {"batch": 6},
    "ViT-S/16, float32": VIT | {"dtype": "float32"},
    "ViT-S/16 with a class token": VIT | {"queries": 197},
    "ViT-S/16, plain": VIT | {"pre": (), "post": ()},
    "405M": {"queries": 2048, "heads": 16, "head_dim": 64, "causal": True},
    "405M, window": {"queries": 2048, "heads": 16, "head_dim": 64, "window": 256},
    "405M, plain": {"queries": 2048, "heads": 16, "head_dim": 64, "causal": True, "pre": (), "post": ()},
    "2.8B": {"queries": 2048, "heads": 32, "head_dim": 80, "causal": True},
    "2.8B, window": {"queries": 2048, "heads": 32, "head_dim": 80, "window": 256},
    "6.9B": {"queries": 2048, "heads": 32, "head_dim": 128, "causal": True},
    "grouped queries": {"queries": 300, "heads": 8, "key_heads": 2, "head_dim": 64, "batch": 2, "causal": True},
    "mask": {"queries": 100, "keys": 333, "heads": 4, "head_dim": 32, "batch": 2, "mask": True},
    "documents": {"queries": 2048, "heads": 16, "head_dim": 64, "causal": True, "segments": True},
    "head groups": {"queries": 128, "heads": 8, "head_dim": 64, "batch": 2, "groups": 2},
    "key-wise only": {"queries": 256, "heads": 8, "head_dim": 64, "pre": ALL[3:], "post": ALL[3:], "causal": True},
    "query-wise only": {"queries": 512, "heads": 8, "head_dim": 64, "pre": ALL[:3], "post": ALL[:3], "causal": True},
    "gates only": {"queries": 256, "heads": 8, "head_dim": 64, "pre": ("qg", "kg"), "post": ("qg", "kg")},
    "pre only": {"queries": 256, "heads": 8, "head_dim": 64, "post": (), "causal": True},
    "static": {"queries": 256, "heads": 8, "head_dim": 64, "pre": (*ALL, "static"), "post": (*ALL, "static")},
    "rank 3": {"queries": 256, "heads": 8, "head_dim": 64, "rank": 3},
    "decoding": {"queries": 1, "keys": 2048, "heads": 16, "head_dim": 64, "batch": 8},
}


def call(
    *, queries: int, heads: int, head_dim: int, keys: int | None = None, batch: int = 1, dtype: str = "bfloat16",
    **more: Any,
) -> dict[str, Mapping[str, Any]]:  # fmt: skip
    """Return the arrays and the options of a call of attention, as `dcvit.dcmha.check.Case` has them.

    Args:
      queries, heads, head_dim, keys, batch, dtype: sizes and dtype of the arrays.
      **more: `key_heads`; the branches `pre` and `post`, by default all dynamic ones; `rank`; `mask` and `segments`, if
        they exist; `causal`, `window` and `groups` of `dcvit.dcmha.attention`.
    """
    keys, groups = keys or queries, more.get("groups", 1)
    kv = (dtype, (batch, keys, more.get("key_heads", heads), head_dim))
    arrays: dict[str, Array] = {"q": (dtype, (batch, queries, heads, head_dim)), "k": kv, "v": kv}
    for compose in ("pre", "post"):
        for name in more.get(compose, ALL):
            tokens, rank = queries if name[0] == "q" else keys, () if name[1] == "g" else (more.get("rank", 2),)
            static = (groups, heads // groups, heads // groups)
            arrays[f"{compose}.{name}"] = (dtype, static if name == "static" else (batch, tokens, *rank, heads))
    if more.get("mask"):
        arrays["mask"] = ("bool", (batch, 1, queries, keys))
    if more.get("segments"):
        arrays |= {"segments.queries": ("int32", (batch, queries)), "segments.keys": ("int32", (batch, keys))}
    options: Sizes = {name: more[name] for name in ("causal", "window") if name in more}
    return {"arrays": arrays, "options": {**options, "groups": groups, "scale": head_dim**-0.5}}


def plan_calls() -> None:
    """Read calls of attention by name from stdin; print environment, cases, and reasons against backends, as JSON."""
    import jax

    from dcvit.dcmha import check, plan
    from dcvit.parallel import runtime

    runtime.configure()
    cases, unsupported = [], {}
    for name, given in json.load(sys.stdin).items():

        def find(arrays: Mapping[str, jax.Array], name: str = name, options: Sizes = given["options"]) -> None:
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
    numbers = {"error": ".1e", "ms": ".3f", "forward_ms": ".3f"}
    cells = {key: "" if (number := verdict.get(key)) is None else format(number, f) for key, f in numbers.items()}
    status = "fastest" if is_best else verdict["status"]
    return {"case": case, "implementation": name, **cells, "verdict": status, "reason": verdict["reason"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        prog="dcvit check-kernels",
        description="Check and time the implementations of attention on this machine's device.",
        examples=["dcvit check-kernels", "dcvit check-kernels vit 405M --json", "dcvit check-kernels --config vit_i1k"],
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases whose names contain one of these")
    parser.add_argument("--config", help="check the calls of attention in this config's training step and evaluators")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--again", action="store_true", help="check again what has a verdict")
    args, overrides = parser.parse(argv)
    from dcvit.config import load as configs

    configs.check(args.config, overrides)
    chosen = {n: s for n, s in CASES.items() if not args.words or any(w.lower() in n.lower() for w in args.words)}
    if not chosen:
        raise ConfigError(f"no case contains {' or '.join(args.words)}; there are {', '.join(CASES)}")

    from dcvit.dcmha import check

    request: object = {name: call(**sizes) for name, sizes in chosen.items()}
    listing = "from dcvit.check_kernels import plan_calls; plan_calls()"
    if args.config:
        listing = "from dcvit.training.kernels import main; main()"
        request = {"config": args.config, "overrides": overrides}
    try:
        environment, cases, *unsupported = check.run_child(listing, request, check.SECONDS)
    except check.ChildError as e:
        raise ConfigError(f"cannot find the calls of attention: {e}") from None
    if args.again:
        check.path(environment).unlink(missing_ok=True)
    rows = []
    for name, reasons in unsupported[0].items() if unsupported else ():
        rows += [row(name, each, check.Verdict(status="unsupported", reason=text)) for each, text in reasons.items()]
    for case in [check.Case(*fields) for fields in cases]:
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
