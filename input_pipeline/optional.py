"""Imports of optional libraries, whose errors name the extra to install, and removal of lines that libraries print."""

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import threading
import types
from collections.abc import Collection, Iterator
from pathlib import Path

from input_pipeline.errors import MissingLibraryError, ReadingError, first_line_with_type

# The extra of each optional library; all others are in the extra `data`.
EXTRAS = {
    "PIL": "train", "jinja2": "train", "matplotlib": "train", "numba": "train", "optax": "train", "orbax": "train",
    "simplejpeg": "train", "sklearn": "train", "tensorstore": "train", "tokenizers": "lm", "zstandard": "lm",
    "huggingface_hub": "hub", "tifffile": "tiff", "imagecodecs": "tiff", "lm_eval": "eval", "gcsfs": "gcs",
    "s3fs": "s3", "wandb": "wandb",
    "flatbuffers": "interop", "jax2onnx": "interop", "onnxruntime": "interop",
}  # fmt: skip

START = threading.Lock()  # of TensorFlow
FROM_FLAX = ("optax", "orbax", "tensorstore")  # those of the extra `train` that flax itself needs

# Lines that carry no information where TensorFlow runs on the CPU only: absl's hint about its own set-up, messages of
# level INFO, and those of the CUDA libraries, which are absent or hidden from TensorFlow.
START_UP_MESSAGE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I\d{4} [\d:.]+ +\d+ [\w.]+:\d+\]"
    rb"|To enable the following instructions: "  # second line of a message of level INFO about the CPU
    rb"|[WE]\d{4} [\d:.]+ +\d+ cuda\w*\.cc:\d+\]"
)


def require(module: str) -> types.ModuleType:
    """Import a module of an optional library and return it.

    Raises:
      MissingLibraryError: the library is not installed.
      ReadingError: it fails to load.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise _missing(e.name or module, EXTRAS.get(module.partition(".")[0], "data")) from None
    except Exception as e:  # a broken installation, or too little memory
        raise ReadingError(f"{module} fails to load: {first_line_with_type(e)}") from e


def folder_of(library: str) -> Path:
    """Return the folder of an optional library, which is not imported.

    Raises:
      MissingLibraryError: the library is not installed.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise _missing(library, EXTRAS.get(library, "data"))
    return Path(spec.origin).parent


def require_extra(extra: str, libraries: Collection[str] = EXTRAS) -> None:
    """Raise MissingLibraryError if a library that `EXTRAS` lists for an extra is not installed; imports none.

    Only those in `libraries` count. A package whose modules import these libraries calls this first, so that they need
    no `Late`.
    """
    for library, its_extra in EXTRAS.items():
        if its_extra == extra and library in libraries and importlib.util.find_spec(library) is None:
            raise _missing(library, extra)


def _missing(library: str, extra: str) -> MissingLibraryError:
    return MissingLibraryError(f'this needs {library}, which is not installed: pip install "dcvit[{extra}]"')


class Late:
    """A module of an optional library, which `require` imports when a name in it is first used."""

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # of tools that inspect or copy any object
            raise AttributeError(name)
        return getattr(require(self._module), name)


def tensorflow() -> types.ModuleType:
    """Import TensorFlow for use on the CPU, with one thread per operation, and return it.

    Accelerators are hidden from TensorFlow because JAX uses them. Operations are not parallel because the loader
    already processes several examples at a time.

    Raises:
      ReadingError: TensorFlow is not installed or fails to load.
    """
    with START:  # a second thread would redirect standard error inside the redirection of the first
        return _start_tensorflow()


@functools.cache
def _start_tensorflow() -> types.ModuleType:
    with remove_lines(START_UP_MESSAGE):
        tf = require("tensorflow")
        for kind in ("GPU", "TPU"):
            tf.config.set_visible_devices([], kind)
    with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized by another library
        tf.config.threading.set_intra_op_parallelism_threads(1)
    return tf


@contextlib.contextmanager
def remove_lines(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Remove the lines that start with `pattern` from what is written to file descriptor 2 inside the context.

    All other lines are written when the context ends. The file descriptor is redirected because libraries write these
    lines themselves: TF_CPP_MIN_LOG_LEVEL has no effect in the static initializers of TensorFlow.
    """
    with contextlib.ExitStack() as stack:
        written = stack.enter_context(tempfile.TemporaryFile())
        stderr = os.dup(2)
        stack.callback(os.close, stderr)
        sys.stderr.flush()
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            written.seek(0)
            os.write(2, b"".join(line for line in written if not pattern.match(line)))
