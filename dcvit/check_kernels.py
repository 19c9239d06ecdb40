"""Verification of the kernels of attention on this device: `python -m dcvit.check_kernels [WORD …] [--config CONFIG]`.

For each case, compiles and runs every implementation of the platform, forward and backward, and compares its output and
gradients with the reference in float32. The verdicts are kept (`dcvit.dcmha.verdicts`): programs use the fastest
implementation that passed. The cases are those of ViT-S/16, of language models, of decoding, and less usual ones; with
--config, those of a config's training step on this machine.

A CPU, which has no kernels, verifies smaller cases (`CPU_LIMITS`). The exit status is 1 if a kernel is wrong, fails or
times out. `--again` also verifies kernels that have a verdict.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dcvit import cli
from dcvit.errors import ConfigError, escaped

if TYPE_CHECKING:
    from dcvit.dcmha.verdicts import Verdict, Verdicts
    from dcvit.dcmha.verification import Case

LOG = logging.getLogger(__name__)
Sizes: TypeAlias = Mapping[str, Any]
Row: TypeAlias = dict[str, str]
ALL = ("q1", "q2", "qg", "k1", "k2", "kg")
VIT = {"queries": 196, "heads": 6, "head_dim": 64, "batch": 8}
# Name -> arguments of `attention_case`.
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
# Largest sizes on a CPU, where those of accelerators take minutes.
CPU_LIMITS = {"queries": 128, "heads": 4, "head_dim": 64, "batch": 2, "window": 32}


def attention_case(
    *, queries: int, heads: int, head_dim: int, keys: int | None = None, batch: int = 1, dtype: str = "bfloat16",
    **more: Any,
) -> tuple[Case, dict[str, str]]:  # fmt: skip
    """Return the `Case` of a call of attention on this platform, and why each of the other backends cannot run it.

    Args:
      queries, heads, head_dim, keys, batch, dtype: sizes and dtype of the arrays.
      **more: `key_heads`; the branches `pre` and `post`, by default all dynamic ones; `rank`; `mask` and `segments`, if
        they exist; `causal`, `window` and `groups` of `dcvit.dcmha.attention`.
    """
    import jax

    from dcvit.dcmha import ComposeWeights, plan
    from dcvit.dcmha.inputs import Inputs, make_call
    from dcvit.dcmha.segments import Segments

    keys, groups = keys or queries, more.get("groups", 1)

    def array(*shape: int, kind: str = dtype) -> Any:  # stands for an array
        return jax.ShapeDtypeStruct(shape, kind)

    def weights(names: Sequence[str]) -> ComposeWeights | None:
        arrays = {}
        for name in names:
            tokens, rank = queries if name[0] == "q" else keys, () if name[1] == "g" else (more.get("rank", 2),)
            arrays[name] = array(batch, tokens, *rank, heads)
            if name == "static":
                arrays[name] = array(groups, heads // groups, heads // groups)
        return ComposeWeights(**arrays) if arrays else None

    kv = array(batch, keys, more.get("key_heads", heads), head_dim)
    mask = array(batch, 1, queries, keys, kind="bool") if more.get("mask") else None
    ids = Segments(array(batch, queries, kind="int32"), array(batch, keys, kind="int32"))
    segments = ids if more.get("segments") else None
    pre, post = (weights(more.get(name, ALL)) for name in ("pre", "post"))
    options = {name: more[name] for name in ("causal", "window", "groups") if name in more}
    call = make_call(Inputs(array(batch, queries, heads, head_dim), kv, kv, pre, post, mask, segments), **options)
    names, reasons = plan.candidates(call)
    return plan.make_case(names, call), reasons


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = cli.Parser(
        "dcvit check-kernels",
        examples=["dcvit check-kernels", "dcvit check-kernels vit 405M --json", "dcvit check-kernels --config vit_i1k"],
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases whose names contain one of these")
    parser.add_argument("--config", help="verify the calls of attention in this config's training step")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--again", action="store_true", help="verify again what has a verdict")
    args, overrides = parser.parse(argv)
    if args.config:
        cli.check_config(args.config, overrides)

    import jax

    from dcvit.dcmha import verdicts

    cli.start_jax()
    store = verdicts.Verdicts(verdicts.environment(jax.local_devices()[0]))
    if args.again:
        store.forget()
    rows = _of_config(args.config, overrides, store) if args.config else _of_cases(args.words, store)
    title = ", ".join(f"{key} {value}" for key, value in store.environment.items())
    cli.show(rows, "json" if args.json else "table", title=title)
    if not args.json:
        print(escaped(f"verdicts: {store.path}"))
    return int(any(row["verdict"] in verdicts.BAD and row["implementation"].startswith("pallas") for row in rows))


def _of_cases(words: Sequence[str], store: Verdicts) -> list[Row]:
    """Verify the cases whose name contains one of the words; return the rows of the table."""
    import jax

    from dcvit.dcmha.device import platform
    from dcvit.dcmha.verdicts import Verdict
    from dcvit.dcmha.verification import examine

    chosen = {n: s for n, s in CASES.items() if not words or any(w.lower() in n.lower() for w in words)}
    if not chosen:
        raise ConfigError(f"no case contains {' or '.join(words)}; there are {', '.join(CASES)}")
    rows: list[Row] = []
    limits = CPU_LIMITS if platform() == "cpu" else {}
    mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])
    for number, (name, sizes) in enumerate(chosen.items(), 1):
        LOG.info("case %d of %d: %s", number, len(chosen), name)
        with jax.set_mesh(mesh):
            limited = {key: min(size, limits[key]) if key in limits else size for key, size in sizes.items()}
            case, reasons = attention_case(**limited)
        unsupported = {name: Verdict("unsupported", reason=reason) for name, reason in reasons.items()}
        rows += _rows(name, examine(case, store) | unsupported)
    return rows


def _rows(case: str, found: Mapping[str, Verdict]) -> list[Row]:
    """Return a row of the table for each implementation in one case; the fastest one that passed is marked."""
    from dcvit.dcmha.verdicts import fastest

    first = fastest(found)
    return [
        {
            "case": case, "implementation": name, "error": "" if v.error is None else f"{v.error:.1e}",
            "ms": "" if v.milliseconds is None else f"{v.milliseconds:.3f}",
            "forward_ms": "" if v.forward_milliseconds is None else f"{v.forward_milliseconds:.3f}",
            "verdict": "fastest" if name == first else v.status, "reason": v.reason,
        }
        for name, v in found.items()
    ]  # fmt: skip


def _of_config(spec: str, overrides: Sequence[str], store: Verdicts) -> list[Row]:
    """Verify the calls of attention in a config's training step; return the table's rows, named by the cases' keys."""
    from dcvit.dcmha.selection import Selection, selecting
    from dcvit.training.measure import trace
    from dcvit.training.setup import load_setup

    setup = load_setup(spec, overrides, stand_in=True)
    with selecting(Selection("verify")) as selection:
        trace(setup)
    return [row for key in selection.chosen for row in _rows(key, store.read(key))]


if __name__ == "__main__":
    sys.exit(cli.run(main))
