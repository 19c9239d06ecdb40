"""Inputs shown by the explorer: packed arrays of layers, predictions, ablations and contributions."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from scipy import special

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.interpret.ablations import ablated_outputs, all_ablations
from dcvit.interpret.activations import run_with_cache
from dcvit.interpret.circuits import largest_contributions
from dcvit.models import Params, lm
from dcvit.models.decoder import token_context
from dcvit.models.lm import LM
from dcvit.models.vit import ViT

TOP = 5
CONTRIBUTIONS = 24  # that a page lists for each composition
Json = dict[str, object]


@dataclasses.dataclass
class Sample:
    """One input of one model, as the page shows it.

    Fields:
      facts: description of the input and results of the model, as JSON data.
      blocks: arrays of layers as text (see `pack`), by the id of the page's element that holds them.
    """

    facts: Json
    blocks: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Options for naming and computing the predictions of a classifier or language model for one input.

    Fields:
      label: function from the index of an output to its name.
      multilabel: probabilities are sigmoids of the logits, instead of their softmax.
      ablate: also compute predictions after ablations.
    """

    label: Callable[[int], str]
    multilabel: bool = False
    ablate: bool = True

    def best(self, p: np.ndarray) -> list[tuple[str, float]]:
        """Return names and probabilities of the most probable outputs."""
        return [(self.label(int(i)), round(float(p[i]), 5)) for i in np.argsort(-p, kind="stable")[:TOP]]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities of all outputs."""
        x = np.asarray(logits, np.float64)
        found: np.ndarray = special.expit(x) if self.multilabel else special.softmax(x)
        return found


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, list[int]], str]:
    """Pack arrays as text: float32, rounded to its first 24 bits, compressed by deflate and encoded in base64.

    Returns:
      The shape of each array, in their order, by name; and the text.
    """
    content = b""
    for x in arrays.values():
        bits = np.ascontiguousarray(x, "<f4").view("<u4")
        content += ((bits + 128) & 0xFFFFFF00).astype("<u4").tobytes()
    return {name: list(x.shape) for name, x in arrays.items()}, base64.b64encode(zlib.compress(content, 9)).decode()


def make_sample(
    number: int,
    model: ViT | LM,
    params: Params,
    inputs: Float[Array, "1 height width channels"] | Int[Array, "1 T"],
    layers: Sequence[int],
    predictions: Predictions | None,
) -> Sample:
    """Run a model on one input and return what a page shows of it.

    Args:
      number: number of the sample in the page.
      model: the model.
      params: its parameters.
      inputs: one preprocessed image, or one row of tokens.
      layers: numbers of the layers to show.
      predictions: options for its predictions; None if the model has no head.

    Raises:
      FloatingPointError: an array or an output is not finite.
    """
    names = ["*/q", "*/k", "*/v", "*/scores", "*/weights"]
    names += [f"*/{where}/*" for where in ("pre", "post") if model.compose in (where, "both")]
    output, arrays = run_with_cache(model, params, inputs, names=names)
    _check_finite({**arrays, "output": output})
    _, tokens, _, width = arrays["block00/q"].shape
    facts: Json = {
        "tokens": tokens, "heads": model.num_heads, "keyHeads": arrays["block00/k"].shape[2], "width": width,
        "groups": model.groups if model.compose else 1, "causal": isinstance(model, LM), "oldest": None,
    }  # fmt: skip
    windows: Sequence[int | None] = [None]
    if isinstance(model, LM):
        windows = lm.layer_windows(model, tokens)
        if model.end_of_text is not None:  # the first token of each token's document
            positions = token_context(inputs, model.end_of_text).positions[0]
            facts["oldest"] = (np.arange(tokens) - np.asarray(positions)).tolist()
    blocks: dict[str, str] = {}
    listed: list[Json] = []
    for layer in layers:
        kept = {name: np.asarray(arrays[f"block{layer:02d}/{name}"][0]) for name in ("q", "k", "v")}
        for where in ("pre", "post"):
            for factor in ComposeWeights._fields:
                if (x := arrays.get(f"block{layer:02d}/{where}/{factor}")) is not None:
                    kept[f"{where}.{factor}"] = np.asarray(x if factor == "static" else x[0])
        block = f"sample{number}-layer{layer}"
        shapes, blocks[block] = pack(kept)
        listed.append({"number": layer, "window": windows[layer % len(windows)], "block": block, "arrays": shapes})
    facts |= {"layers": listed, "contributions": _contributions(model, arrays, layers)}
    if predictions:
        facts |= _predictions(model, params, inputs, output, layers, predictions)
    return Sample(facts, blocks)


def _check_finite(arrays: Mapping[str, Array]) -> None:
    """Raise FloatingPointError if one of the named arrays has numbers that are not finite."""
    for name, x in arrays.items():
        if not jnp.isfinite(x).all():
            raise FloatingPointError(f"{name} is NaN or infinite; check the parameters and the input")


def _contributions(model: ViT | LM, arrays: Mapping[str, Array], layers: Sequence[int]) -> list[Json]:
    """Return up to `CONTRIBUTIONS` largest contributions of pre-compose, then of post-compose, as JSON data."""
    found = [each for layer in layers for each in largest_contributions(arrays, layer, model.groups)]
    ranked = sorted(found, key=lambda each: -abs(round(each.amount, 5)))
    pre, post = ([each for each in ranked if each.where == where][:CONTRIBUTIONS] for where in ("pre", "post"))
    first = next((each for each in (*post, *pre) if each.query != each.key), None)  # which the page opens on
    return [each._asdict() | {"amount": round(each.amount, 5), "first": each is first} for each in (*pre, *post)]


def _predictions(
    model: ViT | LM,
    params: Params,
    inputs: Array,
    output: Array,
    layers: Sequence[int],
    options: Predictions,
) -> Json:
    """Return, as JSON data, the most probable classes or next tokens of the model, and those after each ablation."""
    plain = options.probabilities(np.asarray(output[0, -1] if isinstance(model, LM) else output[0]))
    base = int(np.argmax(plain))
    changed: list[tuple[float, Json]] = []
    if options.ablate:
        ablations = all_ablations(model, layers)
        outputs = ablated_outputs(model, params, inputs, ablations)[:, 0]
        _check_finite({"output after an ablation": outputs})
        for ablation, row in zip(ablations, np.asarray(outputs), strict=True):
            p = options.probabilities(row)
            change = round(float(p[base] - plain[base]), 5)
            described = {key: value for key, value in ablation._asdict().items() if value is not None}
            changed.append((change, {**described, "change": change, "predictions": options.best(p)}))
    changed.sort(key=lambda each: -abs(each[0]))
    return {"predictions": options.best(plain), "ablations": [facts for _, facts in changed]}
