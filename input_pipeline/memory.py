"""Available memory, so that data that is too large is refused before memory is allocated for it."""

from pathlib import Path

MACHINE, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available() -> int | None:
    """Return the bytes of memory that Linux reports as available, or None on systems that do not report it.

    The result is the smaller of the memory available on the machine and within the container's limit.
    """
    lines = MACHINE.read_text().splitlines() if MACHINE.is_file() else []
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    maximum, used, statistics = (CONTAINER / f"memory.{name}" for name in ("max", "current", "stat"))
    if maximum.is_file() and used.is_file() and (limit := maximum.read_text().strip()).isdigit():
        cached = [line.split()[1] for line in statistics.read_text().splitlines() if line.startswith("inactive_file ")]
        limits.append(int(limit) - int(used.read_text()) + sum(map(int, cached)))  # the file cache can be reclaimed
    return min(limits, default=None)
