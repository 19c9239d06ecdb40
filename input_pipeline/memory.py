"""How much memory is left: what is announced and would not fit is refused before it is allocated."""

from pathlib import Path

MACHINE, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available() -> int | None:
    """Bytes of memory that Linux says are left, to the machine and to the container; None where it does not say."""
    lines = MACHINE.read_text().splitlines() if MACHINE.is_file() else []
    left = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used, parts = (CONTAINER / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
        cached = [line.split()[1] for line in parts.read_text().splitlines() if line.startswith("inactive_file ")]
        left.append(int(most) - int(used.read_text()) + sum(map(int, cached)))  # the cache of files gives way
    return min(left, default=None)
