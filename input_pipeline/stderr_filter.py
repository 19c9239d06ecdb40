"""Removal of TensorFlow's start-up messages from the standard error stream."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Lines that carry no information where TensorFlow runs on the CPU only: absl's hint about its own set-up, messages of
# level INFO, and those of the CUDA libraries, which are absent or hidden from TensorFlow.
START_UP_MESSAGE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I\d{4} [\d:.]+ +\d+ [\w.]+:\d+\]"
    rb"|To enable the following instructions: "  # second line of a message of level INFO about the CPU
    rb"|[WE]\d{4} [\d:.]+ +\d+ cuda\w*\.cc:\d+\]"
)


@contextlib.contextmanager
def hide_start_up_messages() -> Iterator[None]:
    """Remove TensorFlow's start-up messages from what is written to file descriptor 2 inside the context.

    All other lines are written when the context ends. File descriptors are redirected because TensorFlow's libraries
    write these messages from their static initializers, where TF_CPP_MIN_LOG_LEVEL has no effect.
    """
    with contextlib.ExitStack() as stack:
        try:
            written = stack.enter_context(tempfile.TemporaryFile())
            stderr = os.dup(2)
        except OSError:  # without stderr or without temporary files the messages stay
            yield
            return
        stack.callback(os.close, stderr)
        _flush()
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, 2)
            written.seek(0)
            with contextlib.suppress(OSError):  # the reader of a pipe is gone
                os.write(2, b"".join(line for line in written if not START_UP_MESSAGE.match(line)))


def _flush() -> None:
    """Write what Python buffers for stderr, which can be absent or closed."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
