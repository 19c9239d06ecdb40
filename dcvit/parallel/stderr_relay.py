"""Passes on what another process writes to stderr, and replaces JAX's report about a lost process by one line.

`dcvit.parallel.aborts` runs this file as a process of its own, which imports nothing else: it outlives a crash of the
other process, whose last lines would be lost in a thread of that process.
"""

import os
import re
import select
import signal
import sys
import time

# The first line of what JAX writes before it aborts a process, and the process that it names.
REPORT = re.compile(rb"^[EF]\d{4} [\d:.]+ +\d+ (?:coordination_service|coordination_service_agent|client)\.\w+:", re.M)
UNHEALTHY = re.compile(rb"stopped sending heartbeats\):\n(\d+)")
ABORTED, DROP = b"\0aborted\0", b"\0drop\0"  # written by the other process: abort() was called, drop a report
LOST, OTHER = b"1", b"0"  # verdict about an abort
HOLD_SECONDS = 5  # between the beginning of the report and abort()


def relay(verdict: int) -> None:
    """Copy stdin to stderr until its end.

    Args:
      verdict: file descriptor to which the reason of an abort is written.
    """
    held, since = b"", 0.0
    while True:
        if not select.select([0], [], [], 0.1 if held else None)[0]:
            if time.monotonic() > since + HOLD_SECONDS:
                write(held)
                held = b""
            continue
        read = os.read(0, 65536)
        if not read:
            write(held)
            return
        since = since if held else time.monotonic()
        text = held + read
        found = REPORT.search(text)
        start = found.start() if found else len(text)
        if ABORTED in text:
            if found:
                lost = UNHEALTHY.search(text)
                write(text[:start] + b"error: stopped because process %d was lost\n" % int(lost[1] if lost else 0))
            else:
                write(text.replace(ABORTED, b""))
            os.write(verdict, LOST if found else OTHER)
            held = b""
        elif DROP in text:
            write(text[: min(start, text.index(DROP))] + text.partition(DROP)[2])
            held = b""
        else:
            write(text[:start])
            held = text[start:]


def write(text: bytes) -> None:
    """Write to stderr."""
    while text:
        text = text[os.write(2, text) :]


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the group; the other process handles them
        signal.signal(number, signal.SIG_IGN)
    try:
        relay(int(sys.argv[1]))
    except OSError:  # nobody reads stderr
        sys.exit(1)
