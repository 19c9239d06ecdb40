"""Writers of traced programs: ONNX, and StableHLO of `jax.export`."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel.trees import nested
from dcvit.weights.export import formats
from dcvit.weights.families import Weights, open_weights, verified
from dcvit.weights.family import build, example
from input_pipeline.optional import require

IMPLEMENTATION = "reference"  # plain operations, which every format has
ONNX, STABLEHLO = "model.onnx", "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
ONNX_BYTES = 1 << 31  # of a protobuf
Apply = Callable[[Any, jax.Array], jax.Array]


def _apply(weights: Weights) -> Apply:
    net = build(weights.description).clone(implementation=IMPLEMENTATION)
    return lambda params, x: net.apply({"params": params}, x)[0]


def _tail(weights: Weights) -> tuple[int, ...]:
    """Return the sizes of the fixed axes of an input after the batch axis: those of an image, none for tokens."""
    return example(weights.description, weights.params).shape[1:] if weights.description.model_name == "vit" else ()


def write_onnx(weights: Weights, folder: Path) -> None:
    """Write `model.onnx`, a model of images with the parameters inside.

    Raises:
      CheckpointError: the model is a language model, an operation or its size cannot be expressed, or jax2onnx is not
        installed.
    """
    if weights.description.model_name != "vit":
        raise CheckpointError("onnx is for models of images; a language model: --to stablehlo or hf")
    jax2onnx, weights = require("jax2onnx"), weights.in_float32()
    if weights.size * 4 >= ONNX_BYTES:
        raise CheckpointError(f"onnx holds at most {ONNX_BYTES:,} bytes, the model has {weights.size * 4:,}")
    images = SimpleNamespace(shape=("B", *_tail(weights)), dtype=np.dtype(np.float32))
    apply, params = _apply(weights), nested(dict(weights.read()))
    try:
        # Nested jitted functions are inlined: jax2onnx 0.13 copies them by private names that JAX 0.12 changed.
        with _silent(), jax.disable_jit():
            proto = jax2onnx.to_onnx(
                lambda x: apply(params, x), inputs=[images], model_name="dcvit", input_names=["images"],
                output_names=["logits"],
            )  # fmt: skip
    except Exception as e:  # the library has no error type of its own
        raise CheckpointError(f"onnx cannot express the model: {_operation(e)}") from None
    (folder / ONNX).write_bytes(proto.SerializeToString())


def write_stablehlo(weights: Weights, folder: Path) -> None:
    """Write `model.stablehlo`, a function of the parameters and the inputs, and the parameters as safetensors.

    Raises:
      CheckpointError: an operation cannot be exported, or flatbuffers is not installed.
    """
    require("flatbuffers")  # writes the file, and JAX does not require it
    weights = weights.in_float32()
    tail = _tail(weights)
    limit = [] if tail else [f"t <= {build(weights.description).context}"]
    free = jax.export.symbolic_shape("b" if tail else "b, t", constraints=limit)
    x = jax.ShapeDtypeStruct((*free, *tail), np.float32 if tail else np.int32)
    flat = {name: jax.ShapeDtypeStruct(tensor.shape, np.float32) for name, tensor in weights.params.items()}
    apply = _apply(weights)
    try:
        exported = jax.export.export(jax.jit(lambda p, x: apply(nested(p), x)), platforms=PLATFORMS)(flat, x)
    except Exception as e:
        raise CheckpointError(f"stablehlo cannot express the model: {_operation(e)}") from None
    (folder / STABLEHLO).write_bytes(exported.serialize())
    formats.write_safetensors(weights, folder, formats.ONE_FILE)


def _operation(error: Exception) -> str:
    """Return "NAME is not supported" for the primitive that an error names, or else its first line."""
    found = re.search(r"primitive[:\s'\"]+([\w-]+)", str(error))
    return f"{found[1]} is not supported" if found else first_line(error)


def run_onnx(weights: Weights, folder: Path, x: np.ndarray) -> np.ndarray:
    """Return the outputs of an ONNX file for images `x`, computed by onnxruntime."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = runtime.InferenceSession(str(folder / ONNX), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": x})[0])


def run_stablehlo(weights: Weights, folder: Path, x: np.ndarray) -> np.ndarray:
    """Return the outputs of a StableHLO file, for the parameters beside it and inputs `x`."""
    exported = jax.export.deserialize(bytearray((folder / STABLEHLO).read_bytes()))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(exported.call(dict(verified(open_weights(folder)).read()), x))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Context manager that discards a library's output, logs and warnings, and allows implicit promotion in JAX."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
