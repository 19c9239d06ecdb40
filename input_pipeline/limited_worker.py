"""Program that answers the requests of `input_pipeline.limited_process` within limits of time and memory.

    python limited_worker.py HANDLER.py SECONDS

HANDLER.py defines the class `Handler`, which is called with a request and returns the reply. Requests and replies are
lists of byte strings; the first string of a reply is an error message or empty.

The program imports no other module of the project, so that it starts in milliseconds.
"""

import os
import resource
import runpy
import signal
import struct
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import IO

BYTES_PER_SECOND = 50_000  # of a request, each of which takes one second more than the limit of seconds
MEMORY = (1 << 30) + (1 << 23) * (os.cpu_count() or 1)  # limit of memory in bytes; libraries start a thread per CPU
MEMORY_PER_BYTE = 1 << 10  # more memory for each byte of a request
FIRST_MEMORY_PER_BYTE = 1 << 7  # more memory, in all requests, for each byte of the first one
SIZE = struct.Struct("<Q")


def read(stream: IO[bytes]) -> list[bytes]:
    """Read a list of byte strings. Returns an empty list at the end of the stream, or if the list is cut off."""
    head = stream.read(SIZE.size)
    lengths = stream.read(SIZE.size * SIZE.unpack(head)[0]) if len(head) == SIZE.size else b""
    sizes = array("Q", lengths[: len(lengths) // SIZE.size * SIZE.size])
    strings = [stream.read(size) for size in sizes]
    return strings if list(map(len, strings)) == sizes.tolist() else []


def write(stream: IO[bytes], strings: Sequence[bytes]) -> None:
    """Write a list of byte strings."""
    sizes = array("Q", map(len, strings))
    stream.write(b"".join([SIZE.pack(len(sizes)), sizes.tobytes(), *strings]))
    stream.flush()


def main(handler: Callable[[list[bytes]], list[bytes]], seconds: int) -> None:
    """Answer requests until the end of stdin, each with a limit of `seconds` and of the time for its bytes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job; the parent decides
        signal.signal(number, signal.SIG_IGN)
    memory = 0
    while request := read(sys.stdin.buffer):
        size = sum(map(len, request))
        memory = memory or MEMORY + FIRST_MEMORY_PER_BYTE * size
        _limit(seconds + size // BYTES_PER_SECOND, memory + MEMORY_PER_BYTE * size)
        try:
            reply = [b"", *handler(request)]
        except MemoryError:
            reply = [b"the limit of memory is exceeded"]
        except BaseException as e:  # a panic of a library in Rust is a BaseException
            reply = [(str(e) or type(e).__name__).encode(errors="replace")]
        write(sys.stdout.buffer, reply)


def _limit(seconds: int, memory: int) -> None:
    """Limit the CPU time from now on, and the memory of the process; macOS does not limit memory."""
    for kind, value in (
        (resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main(runpy.run_path(sys.argv[1])["Handler"](), int(sys.argv[2]))
