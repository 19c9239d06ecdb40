"""Reading of checkpoints: the one that a run resumes from, and parameters without the rest of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from etils import epath
from jaxtyping import PyTree

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel import multihost
from dcvit.parallel.trees import Tensor, check_tree, shapes_of
from dcvit.runs import checksums, steps
from dcvit.runs.files import Folder, absolute, kvstore
from dcvit.versions import open_s3_in_orbax, silence_orbax
from input_pipeline.optional import Late

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    import tensorstore as ts
else:
    ocp, ts = Late("orbax.checkpoint"), Late("tensorstore")  # weights of other formats need neither


def latest(workdir: Folder) -> int | None:
    """Verify the latest checkpoint of a run and return its step; None if there is no checkpoint.

    Raises:
      CheckpointError: the checkpoint is damaged; the message names the latest intact one.
    """
    found = steps.saved_steps(workdir)
    if not found:
        return None
    checkpoint = workdir / steps.FOLDER / str(found[-1])
    if damage := _problems(checkpoint):
        message = steps.damage_message(checkpoint, damage)
        if intact := steps.intact_before(checkpoint):
            raise CheckpointError(f"{message}; {intact} is intact: remove those after it to resume from it")
        raise CheckpointError(
            f"{message}; no earlier checkpoint is intact. Remove {checkpoint.parent} to start from step 0"
        )
    return found[-1]


def restore(checkpoint: Folder, items: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Restore items of a checkpoint that `latest` has verified, with the structure, dtypes and shardings of `items`.

    Raises:
      CheckpointError: the checkpoint is unreadable, or a tree or shape differs.
    """
    check_compatible(checkpoint, items)
    processes = process_options()
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=processes))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(items))
    args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=processes) as reader:
            return dict(reader.restore(absolute(checkpoint), args=ocp.args.Composite(**args)).items())
    except Exception as e:
        raise CheckpointError(f"cannot restore {checkpoint}: {first_line(e)}") from e


def check_compatible(checkpoint: Folder, items: Mapping[str, PyTree]) -> None:
    """Raise CheckpointError if a tree or shape of a checkpoint's items differs from that in `items`."""
    for name in items:
        if not (checkpoint / name).exists():
            raise CheckpointError(f"{checkpoint} has no {name}")
        check_tree(shapes_of(_metadata(checkpoint / name)), shapes_of(items[name]), str(checkpoint))


def is_checkpoint(path: Folder) -> bool:
    """Return True for a workdir with a checkpoint, or the folder of a checkpoint."""
    return (path / steps.ABOUT).is_dir() or bool(steps.saved_steps(path))


def open_params(folder: Folder) -> dict[str, ts.TensorStore]:
    """Return the parameters of a checkpoint by their paths, such as "head/kernel", without reading their values.

    Raises:
      CheckpointError: the checkpoint is missing, damaged or unreadable.
    """
    item = _params(folder)
    if found := steps.problems(folder, only=(item.name,)):
        intact = steps.intact_before(folder)
        hint = f"use --checkpoint {intact}, which is intact" if intact else "no earlier checkpoint is intact"
        raise CheckpointError(f"{steps.damage_message(folder, found)}; {hint}")
    place, context = absolute(item), ts.Context()
    base: dict[str, object] | str = str(place)
    if isinstance(place, Path):
        # Not a URL, in which # and % mean something else; TensorStore refuses ".." in a path.
        base = {"driver": "file", "path": f"{place.resolve()}/"}
    elif str(place).startswith("s3://"):
        base = kvstore(str(place))
    names = shapes_of(_metadata(item))
    if any(name.endswith("/lora_a") for name in names):
        raise CheckpointError(f"{folder} holds adapters of LoRA; 0.2.0 merges them: dcvit convert RUN NEW --to dcvit")
    opened = {}
    for name in names:
        inside = {"driver": "ocdbt", "base": base, "path": name.replace("/", ".")}
        opened[name] = ts.open({"driver": "zarr", "kvstore": inside}, open=True, read=True, context=context)
    try:
        return {name: future.result() for name, future in opened.items()}
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e


def as_tensor(array: ts.TensorStore, path: str) -> Tensor:
    """Return a `Tensor` that reads a parameter of `open_params`, or a slice of it, on demand; errors name `path`."""

    def read() -> np.ndarray:
        try:
            return np.asarray(array.read().result())
        except Exception as e:  # its errors are ValueErrors, but their types are not documented
            raise CheckpointError(f"cannot read {path}: {first_line(e)}") from None

    return Tensor(tuple(array.shape), read)


def _params(folder: Folder) -> Folder:
    """Return the subfolder with the parameters of a checkpoint: the averaged ones, `ema`, or else `params`."""
    return folder / ("ema" if "ema" in checksums.items(folder) else "params")


def _metadata(item: Folder) -> PyTree:
    """Return the tree of shapes and dtypes of a saved item."""
    silence_orbax()
    open_s3_in_orbax(kvstore)
    try:
        return ocp.StandardCheckpointHandler().metadata(epath.Path(absolute(item))).tree
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e


def _problems(checkpoint: Folder) -> list[str]:
    """Return the messages of `steps.problems`. Each process reads a part of the files and gets the result of all."""
    share = (jax.process_index(), jax.process_count())
    found = multihost.gather(f"verified/{checkpoint.name}", steps.problems(checkpoint, share=share))
    return sorted({line for lines in found for line in lines})


def process_options() -> ocp.options.MultiprocessingOptions:
    """Return options by which processes synchronize through the coordinator.

    If the processes are not named, Orbax uses a device computation, which must not run beside the training step.
    """
    silence_orbax()
    open_s3_in_orbax(kvstore)
    return ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
