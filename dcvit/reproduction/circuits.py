"""Figures 5, 7 and 8: diversity of heads, and compositions where only the composed model gives the right answer.

The models are those of the in-context tasks (`dcvit.reproduction.in_context`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

from dcvit.errors import ConfigError
from dcvit.evaluators.in_context import Evaluator
from dcvit.hub.model import TrainedModel, open_trained
from dcvit.interpret.activations import compose_weights_of, run_with_cache
from dcvit.interpret.circuits import captured_variance, circuits, pair_terms
from dcvit.models.lm import LM
from dcvit.reproduction import arms, in_context
from dcvit.reproduction.tables import Cell, Curves, Maps, Row, Table, grid
from dcvit.runs.seeds import workdir_of
from input_pipeline.source import Example

COMPOSITIONS = {"pre": ("scores", "composed_scores"), "post": ("weights", "composed_weights")}
PLAIN, COMPOSED = in_context.ARMS
ALL = "all"  # the sum of the terms of a map


class Case(NamedTuple):
    """A validation example that the composed model answers correctly and the plain model wrongly.

    Fields:
      seed: the seed of both models.
      words: the words of the row up to the query, whose next word is the answer.
      answer: the answer, which the composed model gives.
      plain_answer: the word that the plain model gives.
      shots: the number of examples before the answer's.
      model: the composed model.
      arrays: its arrays for this row up to the query, see `dcvit.interpret.activations`.
    """

    seed: int
    words: Sequence[str]
    answer: str
    plain_answer: str
    shots: int
    model: LM
    arrays: dict[str, jnp.ndarray]


def find_case(runs: Path, seeds: Sequence[int]) -> Case:
    """Return the first example that only the composed model answers correctly, of the smallest seed that has one.

    Raises:
      ConfigError: a run is not complete, or no seed has a case.
    """
    in_context.check_complete(runs, seeds)
    for seed in sorted(seeds):
        trained = {name: open_trained(workdir_of(runs / name, seed)) for name in in_context.ARMS}
        evaluators = {name: evaluated(each) for name, each in trained.items()}
        correct = {name: each.answers.correct for name, each in evaluators.items() if each.answers is not None}
        found = np.flatnonzero(correct[COMPOSED] & ~correct[PLAIN])
        if len(found):
            row, shots = divmod(int(found[0]), in_context.SHOTS + 1)
            return _case(seed, shots, evaluators[COMPOSED].source[row], trained)
    raise ConfigError(
        f"{runs}: no validation example is answered by the composed model only; give more --steps or other --seeds"
    )


def evaluated(trained: TrainedModel) -> Evaluator:
    """Return the evaluator of the validation data after it ran; its `answers` are in the order of the data."""
    mesh, strategy, evaluators = trained.evaluators()
    evaluator: Evaluator = evaluators["validation"]
    evaluator.run(trained.params(evaluator.example, mesh, strategy))
    return evaluator


def _case(seed: int, shots: int, example: Example, trained: dict[str, TrainedModel]) -> Case:
    """Return the `Case` of the answer after `shots` examples of a row; both models run on the tokens before it."""
    target = int(np.flatnonzero(example["is_target"])[shots])
    tokens, decode = example["tokens"][: target + 1].tolist(), trained[COMPOSED].tokenizer().decode
    models = {name: each.language_model() for name, each in trained.items()}
    plain, composed = (
        run_with_cache(*models[name], jnp.asarray([tokens[:-1]], jnp.int32), names=names)
        for name, names in ((PLAIN, []), (COMPOSED, ["block*"]))
    )
    words = [decode([token]).strip() for token in tokens]
    plain_answer = decode([int(jnp.argmax(plain.output[0, -1]))]).strip()
    return Case(seed, words[:-1], words[-1], plain_answer, shots, models[COMPOSED][0], composed.arrays)


def largest_key(case: Case, layer: int) -> tuple[int, int]:
    """Return (head, position of the key) of the largest composed attention weight of the last token in a layer."""
    weights = np.asarray(case.arrays[f"block{layer:02d}/composed_weights"][0, :, -1])
    head, key = np.unravel_index(np.argmax(weights), weights.shape)
    return int(head), int(key)


def terms_of(case: Case, layer: int, where: str, key: int) -> dict[str, np.ndarray]:
    """Return the H×H map of the last token and a key, split by the terms of Eqn 7, and their sum as "all"."""
    weights = compose_weights_of(case.arrays, layer, where)
    assert weights is not None
    terms = pair_terms(weights, len(case.words) - 1, key, groups=case.model.groups)
    found = {name: np.asarray(term, np.float64) + 0.0 for name, term in terms.items()}
    return {**found, ALL: sum(found.values(), np.zeros_like(next(iter(found.values()))))}


def head_columns(case: Case) -> list[str]:
    """Return the names of the table's columns for the heads: "head 0", "head 1", …."""
    return [f"head {head}" for head in range(case.model.num_heads)]


def by_head(case: Case, values: Float[np.ndarray, " H"]) -> dict[str, float]:
    """Return the cells of a table row: `values`, one number per head, by the names `head_columns`."""
    return dict(zip(head_columns(case), map(float, values), strict=True))


def figure7(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 7: the maps between heads of the example of `find_case`, split into the terms of Eqn 7."""
    case = find_case(runs, seeds)
    rows: list[Row] = []
    shares: list[Row] = []
    statements = []
    for layer in range(case.model.depth):
        head, key = largest_key(case, layer)
        for where, (before, after) in COMPOSITIONS.items():
            place, terms = f"layer {layer} {where}", terms_of(case, layer, where, key)
            for name, term in terms.items():
                rows += [
                    {"composition": place, "term": name, "from head": from_head, **by_head(case, line)}
                    for from_head, line in enumerate(term)
                ]
            own = _at(case, layer, before, key)
            parts = {name: own @ term for name, term in terms.items() if name != ALL}
            composed = _at(case, layer, after, key)
            shares += [
                {
                    "composition": place, "key": label(case, key), "head": to_head,
                    **{name: float(part[to_head]) for name, part in parts.items()}, "after": float(composed[to_head]),
                }
                for to_head in range(case.model.num_heads)
            ]  # fmt: skip
            if where == "post":
                most = max((name for name in parts if name != "skip"), key=lambda name: abs(parts[name][head]))
                statements.append(f"- layer {layer}, head {head}: the {most} ({parts[most][head]:+.3f})")
    notes = (
        about(case, steps),
        "A map multiplies the scores (pre) or weights (post) of all heads, as a row vector: the head of a row "
        "contributes to the head of a column. The key of a layer is the one with the largest composed weight of any "
        "head.",
        "What each term adds to a head's score or weight for this pair (“skip” is its value before the "
        f"composition):\n\n{grid(shares)}",
        "In the paper's case, the key-wise projection contributes most to the weight of the head that answers, and "
        "query-wise gates inhibit another head. Here one example illustrates the maps and tests no statement. The term "
        "that changes the largest composed weight of a layer most is:\n\n" + "\n".join(statements),
    )
    return Table("figure7", "Figure 7: composition of scores and weights in a case study", rows, notes,
                 Maps("composition", "term", "from head", head_columns(case)))  # fmt: skip


def figure8(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 8: attention scores and weights of the example of `find_case`, before and after composition."""
    case = find_case(runs, seeds)
    rows: list[Row] = [
        {
            "composition": f"layer {layer} {where}", "when": when, "key": label(case, key),
            **by_head(case, _at(case, layer, name, key)),
        }
        for layer in range(case.model.depth)
        for where, names in COMPOSITIONS.items()
        for when, name in zip(("before", "after"), names, strict=True)
        for key in range(len(case.words))
    ]  # fmt: skip
    moved = []
    for layer in range(case.model.depth):
        before, after = (
            np.asarray(case.arrays[f"block{layer:02d}/{name}"][0, :, -1]).argmax(axis=-1)
            for name in COMPOSITIONS["post"]
        )
        changes = [
            f"head {head} from “{label(case, a)}” to “{label(case, b)}”"
            for head, (a, b) in enumerate(zip(before.tolist(), after.tolist(), strict=True)) if a != b
        ]  # fmt: skip
        moved.append(f"- layer {layer}: {', '.join(changes) or 'no head'}")
    notes = (
        about(case, steps),
        "Pre-compose changes scores, the inputs of the softmax, and post-compose changes weights, its results. A key "
        "is given by its position and its word; the last is the query's own.",
        "In the paper's case, post-compose moves the most attended token of the head that answers to the right one. "
        "One example tests no statement. Here post-compose changes the key with the largest weight of:\n\n"
        + "\n".join(moved),
    )
    return Table("figure8", "Figure 8: attention before and after composition in a case study", rows, notes,
                 Maps("composition", "when", "key", head_columns(case)))  # fmt: skip


def label(case: Case, key: int) -> str:
    """Return a text that names a key: its position in the row and the word there."""
    return f"{key} {case.words[key]}"


def _at(case: Case, layer: int, name: str, key: int) -> np.ndarray:
    """Return numbers of the last token and a key, one per head, from a layer's array `name`, such as "scores"."""
    return np.asarray(case.arrays[f"block{layer:02d}/{name}"][0, :, -1, key], np.float64)


def about(case: Case, steps: int) -> str:
    """Return a note below a table: the example that is shown, and the settings of its models."""
    return (
        f"“{' '.join(case.words)} ____”: DCMHA answers “{case.answer}”, which is correct, and the plain model "
        f"“{case.plain_answer}”. It is the first validation answer, in the order of the data, that only DCMHA gives "
        f"correctly, with seed {case.seed}, the smallest that has one; {case.shots} examples precede it. The query is "
        f"the last word. Models of configs/lm_synthetic.py after {steps} steps; the paper's case is of DCPythia-6.9B."
    )


KINDS = ("QK", "OV")
SHARES = (0.5, 0.9)


def curves(workdir: Path) -> dict[str, Float64[np.ndarray, " N"]]:
    """Return the `captured_variance` of the QK and of the OV circuits of a run's model, mean over its layers."""
    model, params = open_trained(workdir).language_model()
    found = [[captured_variance(forms) for forms in circuits(model, params, layer)] for layer in range(model.depth)]
    return dict(zip(KINDS, np.asarray(found, np.float64).mean(axis=0), strict=True))


def components(curve: Float64[np.ndarray, " N"], share: float) -> int:
    """Return the smallest number of principal components whose captured variance, by `curve`, reaches `share`."""
    return int(np.argmax(curve >= share)) + 1


def figure5(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 5: the captured variance (see `curves`) of both models, mean over layers and seeds."""
    in_context.check_complete(runs, seeds)
    found = {seed: {name: curves(workdir_of(runs / name, seed)) for name in in_context.ARMS} for seed in seeds}
    rows: list[Row] = []
    for kind in KINDS:
        for name in in_context.ARMS:
            means = arms.over_seeds(
                {seed: {str(i): float(x) for i, x in enumerate(found[seed][name][kind], 1)} for seed in seeds}
            )
            rows += [
                {"heads": f"{kind}, {name}", "components": int(i), **mean.cells("captured variance", "± 95 %")}
                for i, mean in means.items()
            ]
    return Table("figure5", "Figure 5: captured variance of QK and OV heads", rows,
                 (in_context.about(seeds, steps), *_notes(found)),
                 Curves("heads", "components", "captured variance", "± 95 %", scale="linear"))  # fmt: skip


def _notes(found: Mapping[int, Mapping[str, Mapping[str, np.ndarray]]]) -> tuple[str, ...]:
    """Return the notes of Figure 5: a table of numbers of components, and the paper's statements with verdicts."""
    rows: list[Row] = []
    statements = []
    for kind in KINDS:
        for name in in_context.ARMS:
            counts = {
                seed: {f"{share:.0%}": float(components(each[name][kind], share)) for share in SHARES}
                for seed, each in found.items()
            }
            row: dict[str, Cell] = {"heads": f"{kind}, {name}"}
            for share, mean in arms.over_seeds(counts).items():
                row |= mean.cells(f"components for {share}", f"± 95 %, {share}")
            rows.append(row)
        area = {seed: {"d": float(np.mean(e[COMPOSED][kind] - e[PLAIN][kind]))} for seed, e in found.items()}
        verdict = arms.decision(arms.over_seeds(area)["d"])
        statements.append(f"- {kind} heads are more diverse with DCMHA: {verdict}")
    return (
        "The heads of a layer are concatenated, W_Q·W_Kᵀ or W_V·W_O; the curves are the cumulative share of variance "
        "that their first principal components capture, mean over layers and seeds. A lower curve means more diverse "
        "heads.",
        f"Components that capture a share of the variance, of the mean over layers:\n\n{grid(rows)}",
        "The paper finds that DCMHA increases the diversity of QK heads significantly and that of OV heads moderately. "
        "With the mean difference of the curves to the plain model with the same seed:\n\n" + "\n".join(statements),
    )
