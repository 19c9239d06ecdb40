"""Tables 5 and 11, Figures 5 to 8: a plain and a composed model of generated in-context tasks, and their heads.

The tasks are those of `input_pipeline.text.synthetic`, not the authors' file, with which any model can be
evaluated (docs/paper.md). Figures 7 and 8 show an example that only the composed model answers correctly.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from paper import runs
from paper.runs import Run, cells, decision, minus, settings
from paper.table import Table, bars, curves, maps

from dcvit.errors import ConfigError
from dcvit.hub.open import Opened, open_model
from dcvit.hub.tokenizers import open_tokenizer_of
from dcvit.interpret.activations import compose_weights_of, run_with_cache
from dcvit.interpret.circuits import captured_variance, circuits, pair_terms
from dcvit.models.lm import LM
from dcvit.pages.evaluation import evaluate
from dcvit.runs.seeds import workdir_of
from dcvit.training.evaluation import open_evaluators
from input_pipeline.text.synthetic import TASKS, Source

STEPS, SHOTS = 600, 3
PLAIN, COMPOSED = "plain", "DCMHA"
# The attention, and the paper's perplexity and accuracy of Pythia-6.9B and DCPythia-6.9B.
ARMS = {PLAIN: ("mha", 10.05, 31.9), COMPOSED: ("dcmha", 7.36, 39.0)}


def train(folder: Path, seeds: Sequence[int], steps: int) -> None:
    """Train the plain and the composed model, in FOLDER/ARM/seedN."""
    specs = {name: f"lm_synthetic:attention={arm[0]},steps={steps},shots={SHOTS}" for name, arm in ARMS.items()}
    runs.train({name: Run(folder / name, spec, {}, "validation/accuracy") for name, spec in specs.items()}, seeds)


def measured(workdir: Path, evaluation: str) -> tuple[float, float]:
    """Return accuracy in percent and perplexity of a trained run in an evaluation; all are stored in the workdir."""

    def compute() -> dict[str, tuple[float, float]]:
        rows = evaluate(open_model(workdir)).rows
        return {row["evaluation"]: (100 * row["accuracy"], row["perplexity"]) for row in rows}

    return runs.stored(workdir / "shots.json", compute)[evaluation]


def table5(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Table 5: the accuracy of both models over all answers, for all numbers of examples before them."""
    train(folder, seeds, steps)
    rows = []
    for name, (_, perplexity, accuracy) in ARMS.items():
        ours, perplexities = zip(*(measured(workdir_of(folder / name, s), "validation") for s in seeds), strict=True)
        rows.append({
            "model": name, "perplexity": float(np.mean(perplexities)), **cells(ours, "accuracy %", "± 95 %"),
            "perplexity, paper": perplexity, "accuracy %, paper": accuracy,
        })  # fmt: skip
    return Table("table5", "Table 5: in-context tasks", rows, [settings(steps, seeds)],
                 bars(rows, "model", "accuracy %", "accuracy %, paper", "± 95 %"))  # fmt: skip


def figure6(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 6: the accuracy of both models by the number of solved examples before the question."""
    train(folder, seeds, steps)
    rows = []
    for name, shots in ((name, shots) for name in ARMS for shots in range(SHOTS + 1)):
        found = [measured(workdir_of(folder / name, seed), f"validation/{shots}-shot")[0] for seed in seeds]
        rows.append({"model": name, "shots": shots, **cells(found, "accuracy %", "± 95 %")})
    return Table("figure6", "Figure 6: in-context tasks by the number of shots", rows, [settings(steps, seeds)],
                 curves(rows, "model", "shots", "accuracy %"))  # fmt: skip


def table11() -> Table:
    """Return Table 11: an example of each pattern and relation of the generated tasks."""
    rows = []
    chosen = {(task.pattern, task.relation): task for task in reversed(TASKS) if not task.reversed}
    for task in (task for task in TASKS if chosen.get((task.pattern, task.relation)) is task):
        source = Source(split="validation", shots=0, tasks=[task.name])
        words = source.tokenizer.decode(source[0]["tokens"].tolist()).split()
        end = words.index(";")
        rows.append({
            "pattern": task.pattern, "relation": task.relation, "domain": task.domain,
            "example": " ".join(words[: end - 1]) + " ____", "answer": words[end - 1],
        })  # fmt: skip
    note = f"One of the {len(TASKS)} tasks for each pattern and relation. The authors' file has 74 tasks."
    return Table("table11", "Table 11: examples of the generated tasks", rows, [note])


def variance(workdir: Path) -> np.ndarray:
    """Return the captured variance of the QK and of the OV circuits, mean over layers: 2 × components."""
    opened = open_model(workdir)
    model, params = opened.module, opened.load_params()
    layers = range(model.depth)
    found = [[captured_variance(forms) for forms in circuits(model, params, layer)] for layer in layers]
    return np.asarray(found, np.float64).mean(axis=0)


def figure5(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 5: the captured variance of both models, mean over layers and seeds."""
    train(folder, seeds, steps)
    found = {name: np.array([variance(workdir_of(folder / name, seed)) for seed in seeds]) for name in ARMS}
    rows, claims = [], []
    for i, kind in enumerate(("QK", "OV")):
        for name, each in found.items():
            rows += [
                {"heads": f"{kind}, {name}", "components": n, **cells(values, "captured variance", "± 95 %")}
                for n, values in enumerate(each[:, i].T.tolist(), start=1)
            ]
        areas = (found[name][:, i].mean(axis=1).tolist() for name in (COMPOSED, PLAIN))
        claims.append(f"{kind} heads are more diverse with DCMHA, by the curves' mean: {decision(minus(*areas))}")
    return Table("figure5", "Figure 5: captured variance of QK and OV heads", rows, [settings(steps, seeds), *claims],
                 curves(rows, "heads", "components", "captured variance"))  # fmt: skip


class Case(NamedTuple):
    """A validation example that the composed model answers correctly and the plain model wrongly."""

    words: Sequence[str]  # of the row up to the query, whose next word is the answer
    model: LM  # the composed one
    arrays: dict[str, jnp.ndarray]  # its arrays for these words, see `dcvit.interpret.activations`
    about: str  # a note below a table

    def of_query(self, layer: int, name: str) -> np.ndarray:
        """Return the array `name` of a layer, such as "scores", for the last token: heads × keys."""
        return np.asarray(self.arrays[f"block{layer:02d}/{name}"][0, :, -1], np.float64)


def find_case(folder: Path, seeds: Sequence[int], steps: int) -> Case:
    """Return the first example that only the composed model answers correctly, of the smallest seed that has one.

    Raises:
      ConfigError: no seed has a case.
    """
    train(folder, seeds, steps)
    for seed in sorted(seeds):
        plain, composed = (open_model(workdir_of(folder / name, seed)) for name in ARMS)
        only = correct(composed) & ~correct(plain)
        if only.any():
            row, number = divmod(int(np.argmax(only)), SHOTS + 1)
            example = open_evaluators(composed).evaluators["validation"].data.source[row]
            tokens = example["tokens"][: np.flatnonzero(example["is_target"])[number] + 1].tolist()
            *words, answer = (open_tokenizer_of(composed).decode([token]).strip() for token in tokens)
            model, params = composed.module, composed.load_params()
            arrays = run_with_cache(model, params, jnp.asarray([tokens[:-1]], jnp.int32), names=["block*"]).arrays
            found = f"“{' '.join(words)} ____”: with seed {seed}, DCMHA answers “{answer}”, the plain model wrongly"
            return Case(words, model, arrays, f"{found}. It is the first such validation example.")
    raise ConfigError(f"{folder}: the composed model alone answers no example; give more --steps or other --seeds")


def correct(trained: Opened) -> np.ndarray:
    """Return, for each answer of the validation data, whether the model gives it."""
    mesh, strategy, evaluators = open_evaluators(trained)
    evaluators["validation"].run(trained.load_params(mesh, strategy))
    return evaluators["validation"].answers.correct


COMPOSITIONS = {"pre": ("scores", "composed_scores"), "post": ("weights", "composed_weights")}


def by_head(values: np.ndarray) -> dict[str, float]:
    """Return table cells of `values`, one number per head."""
    return {f"head {head}": float(value) for head, value in enumerate(values)}


def figure7(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 7: the maps between heads (rows to columns) of an example, split into the terms of Eqn 7.

    The key of a layer is the one with the largest composed attention weight of any head.
    """
    case = find_case(folder, seeds, steps)
    rows = []
    for layer in range(case.model.depth):
        key = int(np.argmax(case.of_query(layer, "composed_weights").max(axis=0)))
        for where in COMPOSITIONS:
            weights = compose_weights_of(case.arrays, layer, where)
            found = pair_terms(weights, len(case.words) - 1, key, groups=case.model.groups)
            terms = {name: np.asarray(term, np.float64) for name, term in found.items()}
            for name, term in {**terms, "all": sum(terms.values())}.items():
                place = {"composition": f"layer {layer} {where}", "term": name}
                rows += [{**place, "from head": head, **by_head(line)} for head, line in enumerate(term)]
    return Table("figure7", "Figure 7: composition of scores and weights in a case study", rows, [case.about],
                 maps(rows, "composition", "term", "from head"))  # fmt: skip


def figure8(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Figure 8: the scores and attention weights of an example before and after composition, by key."""
    case = find_case(folder, seeds, steps)
    rows = [
        {
            "composition": f"layer {layer} {where}", "when": when, "key": f"{key} {word}",
            **by_head(case.of_query(layer, name)[:, key]),
        }
        for layer in range(case.model.depth)
        for where, names in COMPOSITIONS.items()
        for when, name in zip(("before", "after"), names, strict=True)
        for key, word in enumerate(case.words)
    ]  # fmt: skip
    return Table("figure8", "Figure 8: attention before and after composition in a case study", rows, [case.about],
                 maps(rows, "composition", "when", "key"))  # fmt: skip
