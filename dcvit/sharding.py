"""Where arrays live: the batch split over all devices, parameters and optimiser state on each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def data_mesh() -> Mesh:
    """All devices along one axis, "data"."""
    return Mesh(np.array(jax.devices()), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same values on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_example(mesh: Mesh) -> NamedSharding:
    """The first axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """A batch of numpy arrays on the devices; the device count divides the batch size."""
    return {k: jax.device_put(v, by_example(mesh)) for k, v in batch.items()}


def prefetch(batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, ahead: int = 1) -> Iterator[dict[str, jax.Array]]:
    """Batches on the devices, each sent `ahead` batches before it is asked for, so that steps overlap the transfer."""
    sent: deque[dict[str, jax.Array]] = deque()
    try:
        for batch in batches:
            sent.append(put_batch(batch, mesh))
            if len(sent) > ahead:
                yield sent.popleft()
    except Exception:  # what was sent before an error is still served
        yield from sent
        raise
    yield from sent
