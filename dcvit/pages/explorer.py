"""Explorer of a model's composed heads: runs models on inputs, and makes a page that recomputes attention.

The page has queries, keys, values and compose weights of each input, packed by `dcvit.pages.samples`. It computes
scores, compositions and softmax from them (`attention.js`), draws them (`views.js`, `sections.js`) and handles the
controls (`explorer.js`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.errors import ConfigError, InputError
from dcvit.inference.images import ImageModel, read_images
from dcvit.inference.model import LoadedModel
from dcvit.inference.texts import LanguageModel, read_prompts
from dcvit.interpret.activations import layer_numbers
from dcvit.interpret.circuits import captured_variance, circuits
from dcvit.models.packed_images import PackedImages
from dcvit.pages.html import document, picture
from dcvit.pages.samples import Json, Predictions, Sample, make_sample
from input_pipeline.images.folder import find_images

LOG = logging.getLogger(__name__)
SCRIPTS = ("attention", "views", "sections", "explorer")
CURVE_POINTS = 65  # of a curve of captured variance
DIGITS = 5  # of these points
MAX_BYTES = 200_000_000  # of the arrays of a page, which a browser holds in memory

Input = tuple[Json, np.ndarray, Predictions | None]  # facts, model input, and options for its predictions


class Options(NamedTuple):
    """The contents of the page.

    Fields:
      layers: indices of the layers to show; negative ones count from the end. None means all.
      length: the largest number of tokens of a text.
      ablate: compute predictions after ablations.
    """

    layers: Sequence[int] | None = None
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
      ConfigError: inputs or options do not fit the models, or the page is too large.
      InputError: there is no readable input.
      FloatingPointError: a model's activations are not finite.
    """
    runs: list[Json] = []
    samples: list[Sample] = []
    size = 0
    for model in models:
        layers = _layers(model, options)
        if isinstance(model, LanguageModel):
            inputs = _text_inputs(model, files, texts, options, on_error)
        else:
            inputs = _image_inputs(model, files, texts, options, on_error)
        for facts, array, predictions in inputs:
            try:
                sample = make_sample(len(samples), model.module, model.params, jnp.asarray(array), layers, predictions)
            except FloatingPointError as e:
                raise FloatingPointError(f"{model.source}, {facts['name']}: {e}") from None
            sample.facts |= facts | {"run": len(runs)}
            samples.append(sample)
            size += sum(map(len, sample.blocks.values()))
            if size > MAX_BYTES:
                raise ConfigError(
                    f"a page of {len(samples)} inputs has {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f}: give "
                    "fewer inputs, or --layers for fewer layers"
                )
        runs.append({"name": model.source, "facts": _facts(model), "diversity": _diversity(model, layers)})
    if not samples:
        raise InputError("no input could be read")
    return render(f"{models[0].source} · explorer of composed heads", runs, samples)


def render(title: str, runs: Sequence[Json], samples: Sequence[Sample]) -> str:
    """Return the page as HTML.

    Args:
      title: title of the window.
      runs: for each model its `name`, `facts` in one line, and `diversity`, the points of two curves.
      samples: the inputs. Their facts have the `run` (index of the model), a `name`, and of an image `picture`, `rows`,
        `columns` and `extra` (number of tokens before the patches), of a text its tokens as `text`.
    """
    facts = json.dumps({"runs": runs, "samples": [s.facts for s in samples]}, allow_nan=False, separators=(",", ":"))
    data = facts.replace("<", "\\u003c")
    return document("explorer", SCRIPTS, title=title, runs=runs, samples=samples, data=data)


def _layers(model: LoadedModel, options: Options) -> list[int]:
    """Return the indices, from 0, of the layers that the page shows. Raise ConfigError if it cannot show any."""
    if model.module.compose_window is not None:
        raise ConfigError(f"{model.source}: the explorer does not support compose_window={model.module.compose_window}")
    try:
        return layer_numbers(model.module, options.layers)
    except ValueError as e:
        raise ConfigError(f"{model.source}: {e}") from None


def _image_inputs(
    model: LoadedModel,
    files: Sequence[Path],
    texts: Sequence[str],
    options: Options,
    on_error: Callable[[str], None],
) -> Iterator[Input]:
    """Yield the images of files."""
    assert isinstance(model, ImageModel)
    if texts:
        raise ConfigError("--prompt needs a language model: give image files")
    if not files:
        raise ConfigError("no image files: give files, or folders of them")
    module = model.module
    predictions = Predictions(lambda i: str(model.class_names[i]), model.multilabel, options.ablate)
    for names, images in map(model.checked, read_images(find_images(files, on_error), model.pp, on_error)):
        if isinstance(images, PackedImages):
            raise ConfigError(
                "the explorer shows images of one size, but config.pp_predict has the op patches: give --config CONFIG "
                "with a config.pp_predict that resizes to a fixed size"
            )
        for name, image in zip(names, images, strict=True):
            rows, columns = (size // patch for size, patch in zip(image.shape, module.patch_size, strict=False))
            extra = module.registers + module.pool_type.startswith("tok")
            facts: Json = {"name": Path(name).name, "rows": rows, "columns": columns, "extra": extra}
            yield facts | {"picture": picture(image)["src"]}, image[None], predictions if module.num_classes else None


def _text_inputs(
    model: LanguageModel,
    files: Sequence[Path],
    texts: Sequence[str],
    options: Options,
    on_error: Callable[[str], None],
) -> Iterator[Input]:
    """Yield the first `options.length` tokens of each text."""
    if not files and not texts:
        raise ConfigError("no text: give text files, or --prompt TEXT")
    predictions = Predictions(lambda i: model.tokenizer.decode([i]), ablate=options.ablate)
    names = [*(f"text {i + 1}" for i in range(len(texts))), *(file.name for file in files)]
    for name, text in zip(names, read_prompts(texts, files), strict=True):
        tokens = [*model.tokenizer.encode(text)]
        if not tokens:
            on_error(f"{name}: no tokens")
            continue
        longest = min(options.length, model.module.context)
        if len(tokens) > longest:
            LOG.info("%s: the first %d of %d tokens are shown", name, longest, len(tokens))
        shown = [model.tokenizer.decode([token]) for token in tokens[:longest]]
        array = np.asarray([tokens[:longest]], np.int32)
        yield {"name": name, "text": shown}, array, predictions


def _facts(model: LoadedModel) -> str:
    """Return a line that describes a model: kind, layers, heads, width, parameters and attention."""
    module = model.module
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    composed = f"compose {module.compose}, rank {module.rank}, groups {module.groups}" if module.compose else "plain"
    return (
        f"{'language model' if isinstance(model, LanguageModel) else 'image model'}, layers {module.depth}, heads "
        f"{module.num_heads}, width {module.width}, {parameters:,} parameters; attention: {composed}"
    )


def _diversity(model: LoadedModel, layers: Sequence[int]) -> dict[str, list[float]]:
    """Return points of the curves `captured_variance` of the "qk" and the "ov" circuits, mean over layers."""
    found = [[captured_variance(forms) for forms in circuits(model.module, model.params, layer)] for layer in layers]
    curves = np.mean(np.asarray(found), axis=0)
    at = np.linspace(0, curves.shape[1] - 1, min(CURVE_POINTS, curves.shape[1])).round().astype(int)
    return {kind: curve[at].round(DIGITS).tolist() for kind, curve in zip(("qk", "ov"), curves, strict=True)}
