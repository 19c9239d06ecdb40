"""Writers of traced programs of image models: ONNX, and StableHLO of `jax.export`."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel.trees import nested
from dcvit.weights.export import formats
from dcvit.weights.families import Weights, open_weights
from dcvit.weights.family import build, example
from input_pipeline.optional import require

IMPLEMENTATION = "reference"  # plain operations, which every format has
ONNX, STABLEHLO = "model.onnx", "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
ONNX_BYTES = 1 << 31  # of a protobuf
PRIMITIVE = re.compile(r"primitive[:\s'\"]+([\w-]+)")


def _function(weights: Weights, to: str) -> tuple[Callable[[Any, jax.Array], jax.Array], tuple[int, ...]]:
    """Return a model's function of parameters and images, and the height, width and channels of these.

    Raises:
      CheckpointError: the model is a language model.
    """
    if weights.description.model_name != "vit":
        raise CheckpointError(f"{to} is for models of images; a language model: --to hf")
    net = build(weights.description).clone(implementation=IMPLEMENTATION)
    size = example(weights.description, weights.params).shape[1:]
    return lambda params, x: net.apply({"params": params}, x)[0], size


def _refusal(to: str, error: Exception) -> CheckpointError:
    """Return an error that names the primitive that a library's error names, or else has the error's first line."""
    found = PRIMITIVE.search(str(error))
    reason = f"{found[1]} is not supported" if found else first_line(error)
    return CheckpointError(f"{to} cannot express the model: {reason}")


def write_onnx(weights: Weights, folder: Path) -> None:
    """Write `model.onnx`, with the parameters inside.

    Raises:
      CheckpointError: the model is a language model, or an operation or its size cannot be expressed.
      InputError: jax2onnx is not installed.
    """
    apply, size = _function(weights, "onnx")
    jax2onnx = require("jax2onnx")
    if weights.size * 4 >= ONNX_BYTES:
        raise CheckpointError(f"onnx holds at most {ONNX_BYTES:,} bytes, the model has {weights.size * 4:,}")
    params = weights.in_float32().tree()
    images = SimpleNamespace(shape=("B", *size), dtype=np.dtype(np.float32))
    for library in ("jax2onnx", "onnx_ir"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        # The library prints. Nested jitted functions are inlined: 0.13 copies them by names that JAX 0.12 changed.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), jax.disable_jit():
            proto = jax2onnx.to_onnx(
                lambda x: apply(params, x), inputs=[images], model_name="dcvit", input_names=["images"],
                output_names=["logits"],
            )  # fmt: skip
    except Exception as e:  # the library has no error type of its own
        raise _refusal("onnx", e) from None
    (folder / ONNX).write_bytes(proto.SerializeToString())


def write_stablehlo(weights: Weights, folder: Path) -> None:
    """Write `model.stablehlo`, a function of the parameters and the images, and the parameters as safetensors.

    Raises:
      CheckpointError: the model is a language model, or an operation cannot be exported.
      InputError: flatbuffers is not installed.
    """
    apply, size = _function(weights, "stablehlo")
    require("flatbuffers")  # writes the file, and JAX does not require it
    x = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), *size), np.float32)
    flat = {name: jax.ShapeDtypeStruct(tensor.shape, np.float32) for name, tensor in weights.params.items()}
    try:
        exported = jax.export.export(jax.jit(lambda p, x: apply(nested(p), x)), platforms=PLATFORMS)(flat, x)
    except Exception as e:
        raise _refusal("stablehlo", e) from None
    (folder / STABLEHLO).write_bytes(exported.serialize())
    formats.write_safetensors(weights.in_float32(), folder, formats.ONE_FILE)


def run_onnx(weights: Weights, folder: Path, x: np.ndarray) -> np.ndarray:
    """Return the outputs of an ONNX file for images `x`, computed by onnxruntime."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = runtime.InferenceSession(str(folder / ONNX), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": x})[0])


def run_stablehlo(weights: Weights, folder: Path, x: np.ndarray) -> np.ndarray:
    """Return the outputs of a StableHLO file, for the parameters beside it and images `x`."""
    exported = jax.export.deserialize(bytearray((folder / STABLEHLO).read_bytes()))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(exported.call(dict(open_weights(folder).read()), x))
