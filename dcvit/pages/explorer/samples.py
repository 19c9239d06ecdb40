"""Inputs shown by the explorer: packed arrays of layers, predictions, ablations, contributions, attention rollout."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.interpret.ablations import ablated_outputs, all_ablations
from dcvit.interpret.activations import run_with_cache
from dcvit.interpret.contributions import Contribution, largest_contributions
from dcvit.models import Params, lm
from dcvit.models.decoder import token_context
from dcvit.models.lm import LM
from dcvit.models.vit import ViT

FACTORS = ("static", "q1", "q2", "qg", "k1", "k2", "kg")
TOP = 5
CONTRIBUTIONS = 24  # that a page lists for each composition
# Largest integers of arrays that are stored as integers. Errors of q and k add up in scores, those of v average out.
FIXED_POINT = {"q": 16383, "k": 16383, "v": 4095, "composed_weights": 4095, "weights": 4095}
Json = dict[str, object]
Header = tuple[str, list[int], list[float] | None]


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


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[list[Header], str]:
    """Pack arrays as text, compressed by deflate and encoded in base64.

    The arrays in `FIXED_POINT` are stored as 16-bit integers with a scale for each column, others as the upper 24 bits
    of float32. The least significant bytes of all numbers of an array come first, then the next bytes of all, and so
    on, which compresses better.

    Returns:
      For each array its name, its shape, and its scales or None; and the text.
    """
    header: list[Header] = []
    planes: list[bytes] = []
    for name, x in arrays.items():
        if name in FIXED_POINT:
            columns = np.asarray(x, np.float64).reshape(len(x), -1)
            scales = [float(f"{most / FIXED_POINT[name]:.6g}") for most in np.abs(columns).max(axis=0)]
            integers = np.rint(columns / np.where(scales, scales, 1)).astype("<i2")
            numbers = integers.view(np.uint8).reshape(-1, 2)
            header.append((name, list(x.shape), scales))
        else:
            bits = np.ascontiguousarray(x, "<f4").reshape(-1).view("<u4")
            numbers = (bits + 128).view(np.uint8).reshape(-1, 4)[:, 1:]  # rounded
            header.append((name, list(x.shape), None))
        planes.append(numbers.T.tobytes())
    return header, base64.b64encode(zlib.compress(b"".join(planes), 9)).decode()


def packed_size(model: ViT | LM, tokens: int, layers: int) -> int:
    """Return an upper estimate of the bytes that the arrays of an input have in a page.

    Args:
      model: the model.
      tokens: the number of tokens of the input.
      layers: the number of layers that are shown.
    """
    heads, groups = model.num_heads, model.groups if model.compose else 1
    keys = (model.num_key_heads or heads) if isinstance(model, LM) else heads
    columns = (heads + 2 * keys) * (model.width // heads)
    factors = len(model.branches) * heads * (2 * model.rank * model.projection + model.gate)
    static = heads * heads // groups * bool(model.static)
    compositions = {"both": 2, None: 0}.get(model.compose, 1)
    layer = 2 * tokens * columns + 3 * compositions * (tokens * factors + static)
    return (layers * layer + 2 * 2 * tokens * tokens) * 4 // 3 + layers * 12 * columns


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
    names = ["*/q", "*/k", "*/v", "*/scores", "*/weights", "*/composed_weights"]
    names += [f"*/{where}/*" for where in ("pre", "post") if model.compose in (where, "both")]
    output, arrays = run_with_cache(model, params, inputs, names=names)
    _check_finite({**arrays, "output": output})
    _, tokens, _, width = arrays["block00/q"].shape
    groups = model.groups if model.compose else 1
    facts: Json = {
        "tokens": tokens, "heads": model.num_heads, "keyHeads": arrays["block00/k"].shape[2], "width": width,
        "groups": groups, "causal": isinstance(model, LM), "oldest": None,
    }  # fmt: skip
    windows: Sequence[int | None] = [None]
    if isinstance(model, LM):
        windows = [window and (model.prefill_window or window) for window in lm.layer_windows(model)]
        if model.end_of_text is not None:  # the first token of each token's document
            positions = token_context(inputs, model.end_of_text).positions[0]
            facts["oldest"] = (np.arange(tokens) - np.asarray(positions)).tolist()
    blocks: dict[str, str] = {}
    listed: list[Json] = []
    contributions: list[Contribution] = []
    for layer in layers:
        prefix = f"block{layer:02d}/"
        kept = {name: np.asarray(arrays[prefix + name][0]) for name in ("q", "k", "v")}
        for where in ("pre", "post"):
            for factor in FACTORS:
                if (x := arrays.get(f"{prefix}{where}/{factor}")) is not None:
                    kept[f"{where}.{factor}"] = np.asarray(x if factor == "static" else x[0])
        header, blocks[block := f"sample{number}-layer{layer}"] = pack(kept)
        listed.append({"number": layer, "window": windows[layer % len(windows)], "block": block, "arrays": header})
        contributions += largest_contributions(arrays, layer, groups)
    facts |= {"layers": listed, "contributions": _listed(contributions)}
    block, kinds = f"sample{number}-rollout", ("composed_weights", "weights")
    header, blocks[block] = pack({kind: rollout(arrays, model.depth, kind) for kind in kinds})
    facts["rollout"] = {"block": block, "arrays": header}
    if predictions:
        facts |= _predictions(model, params, inputs, output, layers, predictions)
    return Sample(facts, blocks)


def _check_finite(arrays: Mapping[str, Array]) -> None:
    """Raise FloatingPointError if one of the named arrays has numbers that are not finite."""
    for name, x in arrays.items():
        if not jnp.isfinite(x).all():
            raise FloatingPointError(f"{name} is NaN or infinite; check the parameters and the input")


def _listed(contributions: Sequence[Contribution]) -> list[Json]:
    """Return up to `CONTRIBUTIONS` largest contributions of pre-compose, then of post-compose, as JSON data."""
    found: list[Contribution] = []
    for where in ("pre", "post"):
        some = [x._replace(amount=round(x.amount, 5)) for x in contributions if x.where == where]
        found += sorted(some, key=lambda x: -abs(x.amount))[:CONTRIBUTIONS]
    return [x._asdict() for x in found]


def rollout(arrays: Mapping[str, Array], depth: int, kind: str) -> Float[np.ndarray, "T T"]:
    """Return the attention rollout of the first example (Abnar and Zuidema, 2020), from the last layer to the input.

    The matrix of a layer is (1 + A)/2, where A is the mean of the absolute weights over the heads, with rows of sum 1;
    composed weights may be negative.

    Args:
      arrays: the weights of all layers, returned by `run_with_cache`.
      depth: the number of layers.
      kind: "composed_weights" or "weights".
    """
    total: np.ndarray | None = None
    for layer in range(depth):
        mean = np.abs(np.asarray(arrays[f"block{layer:02d}/{kind}"][0], np.float64)).mean(axis=0)
        mean /= np.maximum(mean.sum(axis=-1, keepdims=True), 1e-30)
        one = (np.eye(len(mean)) + mean) / 2
        total = one if total is None else one @ total
    assert total is not None
    return total


def _predictions(
    model: ViT | LM,
    params: Params,
    inputs: Array,
    output: Array,
    layers: Sequence[int],
    options: Predictions,
) -> Json:
    """Return, as JSON data, the most probable classes or next tokens of the model, and those after each ablation."""
    logits = output[0, -1] if isinstance(model, LM) else output[0]
    plain = _probabilities(np.asarray(logits), options.multilabel)
    base = int(np.argmax(plain))
    changed: list[Json] = []
    if options.ablate:
        ablations = all_ablations(model, layers)
        outputs = ablated_outputs(model, params, jnp.asarray(inputs), ablations)[:, 0]
        _check_finite({"output after an ablation": outputs})
        for ablation, row in zip(ablations, np.asarray(outputs), strict=True):
            p = _probabilities(row, options.multilabel)
            change = round(float(p[base] - plain[base]), 5)
            described = {key: value for key, value in ablation._asdict().items() if value is not None}
            changed.append({**described, "change": change, "predictions": _best(p, options.label)})
    return {"predictions": _best(plain, options.label), "ablations": changed}


def _probabilities(logits: np.ndarray, multilabel: bool) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    if multilabel:
        return 1 / (1 + np.exp(-x))
    e = np.exp(x - x.max())
    return e / e.sum()


def _best(p: np.ndarray, label: Callable[[int], str]) -> list[tuple[str, float]]:
    return [(label(int(i)), round(float(p[i]), 5)) for i in np.argsort(-p, kind="stable")[:TOP]]
