"""Imports of optional libraries, with an error message that names the extra to install."""

import contextlib
import functools
import importlib
import types

from input_pipeline.errors import MissingLibraryError, ReadingError, first_line_with_type
from input_pipeline.stderr_filter import hide_start_up_messages

LM_LIBRARIES = ("tokenizers", "zstandard")  # in the extra `lm`; all other optional libraries are in the extra `data`


def require(module: str) -> types.ModuleType:
    """Import a module of an optional library.

    Raises:
      MissingLibraryError: the library is not installed.
      ReadingError: it fails to load.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        extra = "lm" if module.partition(".")[0] in LM_LIBRARIES else "data"
        raise MissingLibraryError(
            f'this needs {e.name}, which is not installed: pip install "dcvit[{extra}]"'
        ) from None
    except Exception as e:  # a broken installation, or too little memory
        raise ReadingError(f"{module} fails to load: {first_line_with_type(e)}") from e


@functools.cache
def tensorflow() -> types.ModuleType:
    """Import TensorFlow for use on the CPU, with one thread per operation.

    Accelerators are hidden from TensorFlow because JAX uses them. Operations are not parallel because the loader
    already processes several examples at a time.

    Raises:
      ReadingError: TensorFlow is not installed or fails to load.
    """
    with hide_start_up_messages():
        tf = require("tensorflow")
        for kind in ("GPU", "TPU"):
            tf.config.set_visible_devices([], kind)
    with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized by another library
        tf.config.threading.set_intra_op_parallelism_threads(1)
    return tf
