"""Explorer pages of small models, without training: images, texts, and heads that are wired by hand."""

import base64
import json
import re
import zlib

import jax.numpy as jnp
import numpy as np
from small_models import make_lm, param_shapes, random_params

from dcvit.models import vit
from dcvit.pages.explorer import render
from dcvit.pages.html import picture
from dcvit.pages.samples import Predictions, make_sample

SIZE, PATCH = (20, 16), 4
TEXT_FIELDS = dict(
    compose="both", static=True, num_key_heads=2, window_pattern="1:1", window=5, prefill_window=6, end_of_text=0,
    qk_norm="rmsnorm",
)  # fmt: skip
IMAGE_FIELDS = dict(compose="both", groups=2, static=True, pool_type="tok", registers=2)
LENGTH = 12


def image_model(**fields):
    """A small ViT with random parameters, and one random image."""
    small = dict(width=32, depth=2, num_heads=4, mlp_dim=32, patch_size=(PATCH, PATCH))
    net = vit.Model(7, **{**small, **IMAGE_FIELDS, **fields})
    image = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, size=(1, *SIZE, 3)), jnp.float32)
    return net, random_params(param_shapes(net, image), 1), image


def text_model(**fields):
    """A small language model with random parameters, and one row of two documents."""
    net, params = make_lm(**{**TEXT_FIELDS, **fields})
    tokens = np.random.default_rng(0).integers(1, net.vocab_size, size=(1, LENGTH))
    tokens[0, 4] = 0
    return net, params, jnp.asarray(tokens, jnp.int32)


def sample_of(number, run, name, net, params, inputs, layers=None, **options):
    """A sample of a page, with the facts that the command adds."""
    layers = range(net.depth) if layers is None else layers
    facts = {"run": run, "name": name}
    if inputs.ndim == 4:
        rows, columns = inputs.shape[1] // net.patch_size[0], inputs.shape[2] // net.patch_size[1]
        extra = net.registers + (net.pool_type == "tok")
        facts |= {"picture": picture(np.asarray(inputs[0]))["src"], "rows": rows, "columns": columns, "extra": extra}
    else:
        facts["text"] = [f"t{token}" for token in np.asarray(inputs[0])]
    found = make_sample(number, net, params, inputs, layers, Predictions(str, **options))
    found.facts |= facts
    return found


def page(samples, runs=("first", "second")):
    """The page of samples."""
    diversity = {"qk": [0.2, 0.6, 1.0], "ov": [0.3, 0.7, 1.0]}
    return render("explorer", [{"name": name, "facts": "a model", "diversity": diversity} for name in runs], samples)


def facts_of(text):
    """The JSON data of a page."""
    return json.loads(re.search(r'id="facts-data">(.*?)</script>', text, re.DOTALL)[1])


def unpack(text, facts):
    """The arrays of a block of a page, in float32."""
    packed = re.search(rf'id="{facts["block"]}">(.*?)</script>', text, re.DOTALL)[1]
    content = np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<f4")
    arrays, start = {}, 0
    for name, shape in facts["arrays"].items():
        end = start + int(np.prod(shape))
        arrays[name] = content[start:end].reshape(shape)
        start = end
    assert start == len(content)
    return arrays
