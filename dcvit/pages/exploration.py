"""Explorer of a model's composed heads: runs models on inputs, and makes the page of `dcvit.pages.explorer`."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import input_pipeline
from dcvit.errors import ConfigError, InputError, nearest
from dcvit.hub.evaluate import open_evaluators
from dcvit.inference.images import ImageModel, read_images
from dcvit.inference.model import LoadedModel
from dcvit.inference.texts import LanguageModel, read_prompts
from dcvit.interpret.attention_maps import layer_numbers
from dcvit.interpret.circuits import captured_variance, circuits
from dcvit.interpret.contributions import average_contributions
from dcvit.models.packed_images import PackedImages
from dcvit.pages.explorer import DIGITS, average_facts, render
from dcvit.pages.explorer.samples import Json, Predictions, Sample, make_sample, packed_size
from dcvit.pages.report.html import picture
from input_pipeline.images.folder import find_images

LOG = logging.getLogger(__name__)
BATCH = 16  # examples of the averages over data that are computed at once
CURVE_POINTS = 65  # of a curve of captured variance
MAX_BYTES = 200_000_000  # of the arrays of a page, which a browser holds in memory
MAX_MATRIX = 2**25  # numbers of a layer's H×T×T matrix; a page computes four


class Options(NamedTuple):
    """The contents of the page.

    Fields:
      layers: indices of the layers to show; negative ones count from the end. None means all.
      data: name of an evaluator of the config, over whose data averages are computed; None omits them.
      limit: the largest number of examples in these averages.
      length: the largest number of tokens of a text.
      ablate: compute predictions after ablations.
    """

    layers: Sequence[int] | None = None
    data: str | None = None
    limit: int = 256
    length: int = 256
    ablate: bool = True


def explore(
    models: Sequence[LoadedModel],
    files: Sequence[Path],
    texts: Sequence[str],
    options: Options,
    on_error: Callable[[str], None],
) -> str:
    """Return the page as HTML.

    Args:
      models: the models, which all run on all inputs.
      files: image files and folders, or text files for a language model.
      texts: texts for a language model.
      options: the contents of the page.
      on_error: called with one line for each file that cannot be read.

    Raises:
      ConfigError: inputs or options do not fit the models, or the page would be too large.
      InputError: there is no readable input.
      FloatingPointError: a model's activations are not finite.
    """
    runs: list[Json] = []
    samples: list[Sample] = []
    chosen = [_layers(model, options) for model in models]
    given = [
        _text_samples(model, files, texts, options, on_error)
        if isinstance(model, LanguageModel) else _image_samples(model, files, texts, on_error)
        for model in models
    ]  # fmt: skip
    _check_size(models, [lengths for lengths, _ in given], chosen)
    for number, (model, layers, (_, inputs_of)) in enumerate(zip(models, chosen, given, strict=True)):
        averages = _averages(model, options.data, options.limit) if options.data else None
        multilabel = isinstance(model, ImageModel) and model.multilabel
        for facts, inputs, label in inputs_of:
            predictions = None if label is None else Predictions(label, multilabel, options.ablate)
            try:
                sample = make_sample(len(samples), model.module, model.params, jnp.asarray(inputs), layers, predictions)
            except FloatingPointError as e:
                raise FloatingPointError(f"{model.source}, {facts['name']}: {e}") from None
            sample.facts |= facts | {"run": number}
            samples.append(sample)
        run: Json = {"name": model.source, "facts": _facts(model), "diversity": _diversity(model, layers)}
        runs.append(run | ({"averages": averages} if averages else {}))
    if not samples:
        raise InputError("no input could be read")
    return render(f"{models[0].source} · explorer of composed heads", runs, samples)


Input = tuple[Json, np.ndarray, Callable[[int], str] | None]
Inputs = tuple[list[int], Iterator[Input]]  # the numbers of tokens, before any is computed, and the inputs


def _layers(model: LoadedModel, options: Options) -> list[int]:
    """Return the indices, from 0, of the model's layers that the page shows. Raise ConfigError if there are none."""
    module = model.module
    if module.compose_layers is not None:
        chosen = tuple(module.compose_layers)
        raise ConfigError(f"{model.source} has compose_layers={chosen}: expected compositions in all layers")
    try:
        return layer_numbers(module, options.layers)
    except ValueError as e:
        raise ConfigError(f"--layers: {e}") from None


def _check_size(
    models: Sequence[LoadedModel], lengths: Sequence[Sequence[int]], layers: Sequence[Sequence[int]]
) -> None:
    """Raise ConfigError if the page would be too large: by each model's input lengths in tokens, and shown layers."""
    size = 0
    for model, tokens, shown in zip(models, lengths, layers, strict=True):
        module, longest = model.module, max(tokens, default=0)
        if module.num_heads * longest**2 > MAX_MATRIX:
            most = math.isqrt(MAX_MATRIX // module.num_heads)
            raise ConfigError(
                f"an input of {longest} tokens is too long for a page of {model.source}: give at most {most}, with a "
                "smaller --length or image"
            )
        size += sum(packed_size(module, length, len(shown)) for length in tokens)
    if size > MAX_BYTES:
        inputs = sum(map(len, lengths))
        raise ConfigError(
            f"a page of {inputs} inputs would have about {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f}: give "
            "fewer inputs, or --layers for fewer layers"
        )


def _image_samples(
    model: LoadedModel, files: Sequence[Path], texts: Sequence[str], on_error: Callable[[str], None]
) -> Inputs:
    """Return the number of tokens of each image, and an iterator of (facts, image, function that names a class)."""
    assert isinstance(model, ImageModel)
    if texts:
        raise ConfigError("--prompt needs a language model: give image files")
    if not files:
        raise ConfigError("no image files: give files, or folders of them")
    module = model.module
    extra = module.registers + module.pool_type.startswith("tok")
    found = find_images(files, on_error)
    batches = map(model.checked, read_images(found, model.pp, on_error))
    first = next(batches, None)
    if first is None:
        return [], iter(())
    shown = first[1]
    if isinstance(shown, PackedImages):
        raise ConfigError(
            "the explorer shows images of one size, but config.pp_predict has the op patches: give --config CONFIG "
            "with a config.pp_predict that resizes to a fixed size"
        )
    if (channels := shown.shape[-1]) not in (1, 3):
        LOG.info("the pictures show the first of %d channels", channels)
    sizes = zip(shown.shape[1:], module.patch_size, strict=False)
    tokens = extra + math.prod(size // patch for size, patch in sizes)
    label = (lambda i: str(model.class_names[i])) if module.num_classes else None

    def inputs() -> Iterator[Input]:
        for names, images in itertools.chain([first], batches):
            for name, image in zip(names, images, strict=True):
                rows, columns = (size // patch for size, patch in zip(image.shape, module.patch_size, strict=False))
                facts: Json = {"name": Path(name).name, "picture": picture(image, name).get("src")}
                yield facts | {"rows": rows, "columns": columns, "extra": extra}, image[None], label

    return [tokens] * len(found), inputs()


def _text_samples(
    model: LanguageModel,
    files: Sequence[Path],
    texts: Sequence[str],
    options: Options,
    on_error: Callable[[str], None],
) -> Inputs:
    """Return each text's number of tokens, and an iterator of (facts, up to `options.length` tokens, token's name)."""
    if not files and not texts:
        raise ConfigError("no text: give text files, or --prompt TEXT")
    decode = model.tokenizer.decode
    found: list[Input] = []
    for i, text in enumerate(read_prompts(texts, files)):
        name = f"text {i + 1}" if i < len(texts) else files[i - len(texts)].name
        tokens = [*model.tokenizer.encode(text)]
        if not tokens:
            on_error(f"{name}: no tokens")
            continue
        longest = min(options.length, model.module.context)
        if len(tokens) > longest:
            LOG.info("%s: the first %d of %d tokens are shown", name, longest, len(tokens))
        tokens = tokens[:longest]
        facts: Json = {"name": name, "text": [decode([token]) for token in tokens]}
        found.append((facts, np.asarray([tokens], np.int32), lambda i: decode([i])))
    return [inputs.shape[1] for _, inputs, _ in found], iter(found)


def _facts(model: LoadedModel) -> str:
    """Return a line that describes a model: kind, layers, heads, width, parameters and attention."""
    module = model.module
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    composed = f"compose {module.compose}, rank {module.rank}, groups {module.groups}" if module.compose else "plain"
    return (
        f"{'language model' if isinstance(model, LanguageModel) else 'image model'}, layers {module.depth}, heads "
        f"{module.num_heads}, width {module.width}, {parameters:,} parameters; attention: {composed}"
    )


def _averages(model: LoadedModel, data: str, limit: int) -> Json:
    """Return average contributions between heads over up to `limit` examples of the evaluator `data`, as JSON data."""
    if model.opened is None or model.opened.workdir is None:
        raise ConfigError(f"--data {data}: {model.source} is no run, so that no data belongs to it")
    evaluators = open_evaluators(model.opened).evaluators
    if data not in evaluators:
        raise ConfigError(f"--data {data}: no evaluator of the config; {nearest(data, evaluators)}")
    evaluator = evaluators[data]
    model.check_inputs(evaluator.example, model.source)
    is_text = isinstance(model, LanguageModel)

    def batches() -> Iterator[np.ndarray]:
        left = limit
        for batch in input_pipeline.eval_batches(evaluator.source, getattr(evaluator, "pp", ""), BATCH):
            if "grid" in batch:
                raise ConfigError(
                    f"--data {data}: the explorer shows images of one size, but its pp has the op patches"
                )
            rows = (batch["tokens"][:, :-1] if is_text else batch["image"])[batch["_mask"] > 0][:left]
            left -= len(rows)
            if len(rows):
                yield rows
            if not left:
                return

    return average_facts(average_contributions(model.module, model.params, map(jnp.asarray, batches())), data)


def _diversity(model: LoadedModel, layers: Sequence[int]) -> dict[str, list[float]]:
    """Return points of the curves `captured_variance` of the "qk" and the "ov" circuits, mean over layers."""
    found = [[captured_variance(forms) for forms in circuits(model.module, model.params, layer)] for layer in layers]
    curves = np.mean(np.asarray(found), axis=0)
    at = np.linspace(0, curves.shape[1] - 1, min(CURVE_POINTS, curves.shape[1])).round().astype(int)
    return {kind: curve[at].round(DIGITS).tolist() for kind, curve in zip(("qk", "ov"), curves, strict=True)}
