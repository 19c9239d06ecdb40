"""Named tensors in files of other libraries, each read on demand.

The format is recognized by content: safetensors, `.npz` and `.bv` of big_vision, or a file of PyTorch. A folder holds
one file, or the shards that its index lists. Nothing is unpickled: PyTorch's files are read by its own reader of plain
tensors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel.trees import Tensor, Tensors
from dcvit.runs import checksums
from dcvit.weights import big_vision_files, npz

PROCESSOR = "preprocessor_config.json"  # of image models of Hugging Face
INDEX_SUFFIX = ".index.json"
# In a folder, in transformers' order; indexes of other formats, such as flax_model.msgpack, are not among them.
FILE_NAMES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "params.npz",
)  # fmt: skip
GENERATION = "generation_config.json"  # of language models of Hugging Face
TOKENIZER = "tokenizer.json"
OWN_KEY = "dcvit"  # of the description of a model of this project, in a header or in config.json
LFS_POINTER = b"version https://git-lfs"  # the beginning of a file that Git has not fetched
ZIP_MAGIC, TORCH_MEMBER = b"PK\x03\x04", "/data.pkl"
TORCH_ROOTS = ("state_dict", "model")  # of training checkpoints, which hold more than the weights

# Of parameters; other numbers, such as those of quantized layers, have scales that no family knows.
DTYPES = tuple(map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)))

Json: TypeAlias = dict[str, Any]  # the content of a config.json or an index


class WeightsFile(NamedTuple):
    """The tensors of a file or a folder, and the content of the config.json beside them, if there is one.

    The contents of a preprocessor_config.json and a generation_config.json are in `config` by these names.
    """

    path: Path
    tensors: Tensors
    config: Json


def open_file(path: Path) -> WeightsFile:
    """Open a file of weights, or a folder with such a file or with shards and their index.

    Raises:
      CheckpointError: the path holds no weights in a known format, or a file is damaged or unsafe.
    """
    located = big_vision_files.locate(path)
    checksums.check_weights(located.path if located else path)
    if located and (located.subtree or located.path.is_dir()):
        config = located.path / "config.json"  # describes a whole folder, not a subtree
        description = read_json(config) if config.is_file() and not located.subtree else {}
        return WeightsFile(path, big_vision_files.open_arrays(located), description)
    if not path.exists():
        big_vision_files.check_named(str(path))
    config = path / "config.json" if path.is_dir() else path.with_name("config.json")
    description = read_json(config) if config.is_file() else {}
    for name in (PROCESSOR, GENERATION):
        if description and (beside := config.with_name(name)).is_file():
            description[name] = read_json(beside)
    tensors, first = _open_folder(path) if path.is_dir() else (_open_one(path), path)
    description = {**_own_description(first), **description}
    return WeightsFile(path, tensors, description)


def of_floats(tensors: Tensors, path: Path) -> Tensors:
    """Return tensors that raise CheckpointError, with the path, when they are read with a dtype not in `DTYPES`."""

    def read(name: str, tensor: Tensor) -> np.ndarray:
        array = tensor.read()
        if array.dtype not in DTYPES:
            expected = ", ".join(map(str, DTYPES))
            raise CheckpointError(f"{path}: {name} has numbers of {array.dtype}; expected {expected}")
        return array

    return {name: Tensor(x.shape, functools.partial(read, name, x)) for name, x in tensors.items()}


def _open_folder(path: Path) -> tuple[Tensors, Path]:
    """Return the tensors of a folder, and its file or first shard."""
    found = next((path / name for name in FILE_NAMES if (path / name).is_file()), None)
    if found and found.name.endswith(INDEX_SUFFIX):
        return _open_shards(found, read_json(found))
    files = [found] if found else sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(f"{path} has {len(files)} files of weights and no index of them; give one of them")
    if not files:
        raise CheckpointError(f"{path} has no weights: expected one of {', '.join(FILE_NAMES)}")
    return _open_one(files[0]), files[0]


def tokenizer_of(weights: Path) -> Path | None:
    """Return the tokenizer.json in the folder of weights, or beside their file; None if there is none."""
    file = (weights if weights.is_dir() else weights.parent) / TOKENIZER
    return file if file.is_file() else None


def read_json(path: Path) -> Json:
    """Return a JSON object. Raises CheckpointError if the file is damaged or has another value."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as e:
        raise CheckpointError(f"cannot read {path}: {first_line(e)}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return found


def shards(index: Path, content: Json) -> dict[str, str]:
    """Return the name of the file of each tensor that an index lists; the files are beside the index.

    Raises:
      CheckpointError: the index has another form, or names something that is not a file beside it.
    """
    found = content.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{index}: expected weight_map, the file of each tensor")
    for name in sorted(set(found.values())):
        if not name or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
    return found


def _open_shards(index: Path, content: Json) -> tuple[Tensors, Path]:
    """Return the tensors that an index lists, from all shards, and the path of the first shard."""
    files = shards(index, content)
    opened = {name: _open_one(index.with_name(name)) for name in sorted(set(files.values()))}
    missing = [tensor for tensor, name in files.items() if tensor not in opened[name]]
    if missing:
        raise CheckpointError(f"{index}: {files[missing[0]]} has no {missing[0]}, which the index lists")
    return {tensor: opened[name][tensor] for tensor, name in files.items()}, index.with_name(next(iter(opened)))


def _open_one(path: Path) -> Tensors:
    """Return the tensors of one file, whose first bytes determine the format."""
    try:
        if not path.is_file():  # opening a named pipe would block
            raise CheckpointError(f"no file {path}")
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from None
    if start == LFS_POINTER:
        raise CheckpointError(f"{path} is a pointer of Git LFS without the weights; fetch them: git lfs pull")
    if start[8:9] == b"{":
        return _open_safetensors(path)
    if start.startswith(ZIP_MAGIC) and not _is_torch(path):
        return big_vision_files.open_arrays(big_vision_files.Source(path, ""))
    return _open_torch(path)


def _open_safetensors(path: Path) -> Tensors:
    import safetensors

    try:
        file = safetensors.safe_open(path, framework="numpy")
        names = list(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except Exception as e:  # the library has exceptions of its own
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {first_line(e)}") from None

    def read(name: str) -> np.ndarray:
        try:  # opened again each time: an open file would keep all pages that were read in the memory of the process
            array: np.ndarray = safetensors.safe_open(path, framework="numpy").get_tensor(name)
        except Exception as e:
            raise CheckpointError(f"{path}: cannot read {name}: {first_line(e)}") from None
        return array

    return {name: Tensor(shapes[name], functools.partial(read, name)) for name in names}


def _own_description(path: Path) -> Json:
    """Return the description of a model of this project in a safetensors or `.npz` file; {} for other files."""
    import safetensors

    with contextlib.suppress(Exception):  # another format, or a damaged file, which `_open_one` reports
        if is_npz(path):
            text = str(npz.open_arrays(path)[OWN_KEY].read())
        else:
            text = safetensors.safe_open(path, framework="numpy").metadata()[OWN_KEY]
        return {OWN_KEY: json.loads(text)}
    return {}


def is_npz(path: Path) -> bool:
    """Return True for a zip archive that is not a file of PyTorch."""
    return zipfile.is_zipfile(path) and not _is_torch(path)


def _is_torch(path: Path) -> bool:
    """Return True for a zip archive of PyTorch, whose members include a pickle of its structure."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(TORCH_MEMBER) for name in archive.namelist())
    except Exception:  # zipfile raises many types of exceptions; the reader of .npz files reports the damage
        return False


def _open_torch(path: Path) -> Tensors:
    """Open a file that `torch.save` wrote, with PyTorch's reader that creates tensors and plain containers only."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path} is no safetensors or .npz file; "
            'to read a file of PyTorch, install it: pip install "dcvit[interop]"'
        ) from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception:  # its message recommends to unpickle the file, which could run code
        raise CheckpointError(f"{path} is damaged, or no file of plain tensors") from None
    for key in TORCH_ROOTS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path} does not hold tensors by name")

    def read(name: str, tensor: torch.Tensor) -> np.ndarray:
        try:
            if tensor.dtype == torch.bfloat16:  # numpy has no such dtype of its own
                return np.asarray(tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
            return np.asarray(tensor.numpy())
        except (TypeError, RuntimeError) as e:  # sparse, quantized, or of a dtype that numpy lacks
            raise CheckpointError(f"{path}: cannot read {name}: {first_line(e)}") from None

    return {
        str(name): Tensor(tuple(tensor.shape), functools.partial(read, str(name), tensor.detach()))
        for name, tensor in content.items()
    }
