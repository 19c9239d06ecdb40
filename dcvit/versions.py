"""The version, every switch by version of JAX 0.10 to 0.12, and every private name of JAX, etils and Orbax.

The docstring of each function states why a public name does not suffice, and when the function can be deleted. No issue
of JAX, Orbax or TensorStore is known that asks for a missing public name. All imports are inside functions: the modules
that use this one also work where a library is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from sys import UnraisableHookArgs as Unraisable

    from jax.extend.core import Primitive
    from jaxtyping import Array, Float

__version__ = "0.2.0"

Spec = dict[str, object]  # of TensorStore, as JSON
Value: TypeAlias = Any  # objects of JAX without a public type: values of MLIR, references, its state


def shard_alike(x: Float[Array, "*shape"], like: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `x`; the compiler gives `x` and `like` the same sharding, whichever of the two determines it.

    JAX 0.12 removed `jax.experimental.shard_alike` without a replacement: while a function is traced, arrays on axes of
    type Auto have no sharding that could be passed on. This primitive adds both arrays to a sharding group of Shardy,
    JAX's only partitioner from 0.12. Delete it when JAX has a public function for sharding groups.

    Raises:
      NotImplementedError: when lowered with `jax_use_shardy_partitioner=False`, which JAX 0.10 and 0.11 allow.
    """
    return _shard_alike().bind(x, like)[0]


@functools.cache
def _shard_alike() -> Primitive:
    """Return the JAX primitive of `shard_alike`: it returns (x, like), and is linear in both."""
    import jax
    from jax.extend.core import Primitive
    from jax.extend.mlir.dialects import sdy
    from jax.interpreters import ad, batching, mlir

    primitive = Primitive("dcvit_shard_alike")
    primitive.multiple_results = True
    ids = itertools.count(2**32)  # of groups in one program; JAX 0.10 and 0.11 count theirs from 0

    def lower(ctx: Value, x: Value, like: Value) -> tuple[Value, Value]:
        if not getattr(jax.config, "jax_use_shardy_partitioner", True):
            raise NotImplementedError("dcvit needs the Shardy partitioner: set jax_use_shardy_partitioner=True")
        group = next(ids)
        for value in (x, like):
            sdy.sharding_group(value, group)
        return x, like

    def transpose(cotangents: Value, x: Value, like: Value) -> Value:
        if any(isinstance(ct, ad.Zero) for ct in cotangents):
            return cotangents
        return primitive.bind(*cotangents)

    def batch(args: Value, axes: Value) -> Value:
        size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
        fronted = (batching.bdim_at_front(x, axis, size) for x, axis in zip(args, axes, strict=True))
        return primitive.bind(*fronted), (0, 0)

    primitive.def_impl(lambda *args: jax.jit(primitive.bind)(*args))
    primitive.def_abstract_eval(lambda x, like: (x, like))
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower)
    return primitive


def process_state() -> Value:
    """Return JAX's state of `jax.distributed`, which has the process index and the client of the coordinator.

    The public `jax.process_index` and `jax.process_count` set up the backend, which can block, and must not happen
    before `jax.distributed.initialize`; `jax.distributed.is_initialized` tells only that there is a client. No public
    name is known for the client, whose key-value store is used. Delete when it has one.
    """
    from jax._src import distributed

    return distributed.global_state


def on_cloud_tpu() -> bool:
    """Return True on a Cloud TPU VM. JAX detects this by PCI devices; no public name is known for the result."""
    from jax._src import cloud_tpu_init

    return bool(cloud_tpu_init.running_in_cloud_tpu_vm)


def cluster_size() -> int:
    """Return the number of processes of the cluster in which JAX detects this process, and 1 if it detects none.

    The public `jax.distributed.initialize` detects the cluster and waits for all its processes in one call, so it
    cannot answer if there are several. Delete when the detection has a public name.

    Raises:
      Exception: an error of Kubernetes' API, which JAX asks in a pod of an Indexed Job.
    """
    from jax._src.clusters import ClusterEnv, K8sCluster

    for cluster in ClusterEnv._cluster_types:
        if cluster is K8sCluster and "JOB_COMPLETION_INDEX" not in os.environ:
            continue  # JAX connects no other pods, but asks the API, or warns, in every pod
        if not cluster.opt_in_only_method and cluster.is_env_present():
            return int(cluster.get_process_count())
    return 1


def replace_backend(name: str, factory: Callable[[], object], priority: int) -> None:
    """Let JAX call `factory` for a backend that it has not initialized, and skip the backend if `factory` raises.

    The setting jax_platforms cannot exclude one platform: it lists platforms that must all be available.
    """
    from jax.extend.backend import register_backend_factory

    with contextlib.suppress(RuntimeError):  # it is initialized
        register_backend_factory(name, factory, priority=priority, fail_quietly=True)


def load_any(ref: Value) -> Array:
    """Load an array of global memory into the register layout of a matrix product's result, with any access pattern.

    Before JAX 0.12, `plgpu.load` requires the argument `idx`. Delete with JAX 0.11.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    parameter = inspect.signature(plgpu.load).parameters.get("idx")
    index: list[tuple[()]] = [] if parameter is None or parameter.default is not parameter.empty else [()]
    return plgpu.load(ref, *index, layout=plgpu.Layout.WGMMA, optimized=False)


def store_any(ref: Value, x: Array) -> None:
    """Store an array in global memory, with any access pattern.

    From JAX 0.12, writes of partial cache lines need `plgpu.store(optimized=False)`. Delete with JAX 0.11.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def use_fsspec_in_etils() -> None:
    """Let etils open URLs by fsspec also if TensorFlow, which knows no s3://, is installed.

    etils reads the variable EPATH_USE_TF when it uses its first path, remembers the result, and has no public function
    that changes it. The variable keeps its value if it has one.
    """
    from etils.epath import gpath

    os.environ.setdefault("EPATH_USE_TF", "false")
    gpath._is_tf_installed.cache_clear()


@functools.cache
def open_s3_in_orbax(kvstore: Callable[[str], Spec]) -> None:
    """Let Orbax 0.12 save to and restore from s3://, for which it takes a local path, unlike TensorStore.

    Orbax then builds the specification of the same path at gs://, in which the driver and the bucket are replaced by
    `kvstore(URL of the bucket)`. Delete when Orbax opens s3:// with an endpoint.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    def replaced(spec: Value) -> Value:
        if isinstance(spec, list):
            return [replaced(part) for part in spec]
        if not isinstance(spec, dict):
            return spec
        if str(spec.get("driver")).startswith("gcs"):
            return {**kvstore(f"s3://{spec['bucket']}"), "path": spec["path"]}
        return {key: replaced(part) for key, part in spec.items()}

    def with_s3(build: Callable[..., Spec]) -> Callable[..., Spec]:
        def spec(directory: str, *args: object, **options: object) -> Spec:
            if not directory.startswith("s3://"):
                return build(directory, *args, **options)
            found: Spec = replaced(build(directory.replace("s3://", "gs://", 1), *args, **options))
            return found

        return spec

    for name in ("_build_ocdbt_kvstore_tspec", "_build_non_ocdbt_kvstore_tspec"):
        setattr(tensorstore_utils, name, with_s3(getattr(tensorstore_utils, name)))


@functools.cache
def silence_orbax() -> None:
    """Print no log records of Orbax, and no traceback when a save fails: the caller of Orbax gets the first error.

    Orbax logs warnings, and errors with their traceback, before it raises them. Orbax 0.12 closes its event loop at the
    first error of a save. Other writes that are still in progress then report their own errors to asyncio's logger, or
    cannot report their success because the loop is closed. The first read or save of a checkpoint calls this, so that
    an import changes no state of the process.
    """
    import asyncio

    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "was never retrieved" not in record.getMessage())
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def except_closed_loop(error: Unraisable) -> None:
        closed = error.object is None and str(error.exc_value) == "Event loop is closed"
        if not closed and error.object is not asyncio.BaseEventLoop.__del__:  # of a loop that could not be opened
            report(error)

    sys.unraisablehook = except_closed_loop  # TensorStore's threads call it
