"""Named tensors in files of other libraries, each read on demand.

The format is recognized by content: safetensors, `.npz` and `.bv` of big_vision, or a file of PyTorch. A folder holds
one file, or the shards that its index lists. Nothing is unpickled: PyTorch's files are read by its own reader of plain
tensors.

Arrays of big_vision (https://github.com/google-research/big_vision) are named by their path in the tree, below `params`
or `opt/target`, or from the root. A `.bv` checkpoint has a folder of the zarr format for each array, with "~" for "/",
and a pointer `NAME-LAST` to the folder of the last step. `FILE:img` names a subtree, such as the image tower of SigLIP.
Names of earlier releases are converted to today's names: `Transformer/posembed_input`, the numbers of modules before
flax linen, and the inlined pooling head. The row of position embeddings for the class token is added to that token.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel.trees import Tensor, Tensors
from dcvit.runs import checksums
from input_pipeline.optional import require

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
# The wheel for CPUs, of some hundred MB, instead of that of PyPI, which brings several GB of CUDA's libraries.
INSTALL_TORCH = 'pip install "dcvit[torch]" --extra-index-url https://download.pytorch.org/whl/cpu'
ZIP_MAGIC, TORCH_MEMBER = b"PK\x03\x04", "/data.pkl"
# Of parameters; other numbers, such as those of quantized layers, have scales that no family knows.
DTYPES = tuple(map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)))
TORCH_ROOTS = ("state_dict", "model")  # of training checkpoints, which hold more than the weights
ROOTS = ("params/", "opt/target/")
POINTER = "-LAST"
BEFORE_LINEN = {"MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0", "LayerNorm_2": "LayerNorm_1",
                "MlpBlock_3": "MlpBlock_0"}  # fmt: skip
INLINED_HEAD = ("probe", "MlpBlock_0", "MultiHeadDotProductAttention_0", "LayerNorm_0")
OLD_POSITIONS = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding")

Json: TypeAlias = dict[str, Any]  # the content of a config.json or an index


class WeightsFile(NamedTuple):
    """The tensors of a file or a folder, and the content of the config.json beside them, if there is one.

    The contents of a preprocessor_config.json and a generation_config.json are in `config` by these names.
    """

    path: Path
    tensors: Tensors
    config: Json


def of_floats(tensors: Tensors, path: Path) -> Tensors:
    """Return tensors that raise CheckpointError, with the path, when they are read with a dtype not in `DTYPES`."""

    def read(name: str, tensor: Tensor) -> np.ndarray:
        array = tensor.read()
        if array.dtype not in DTYPES:
            expected = ", ".join(map(str, DTYPES))
            raise CheckpointError(f"{path}: {name} has numbers of {array.dtype}; expected {expected}")
        return array

    return {name: Tensor(x.shape, functools.partial(read, name, x)) for name, x in tensors.items()}


class Source(NamedTuple):
    """A file, or a folder of big_vision, and the subtree to read, "" for all."""

    path: Path
    subtree: str = ""


def open_file(path: Path) -> WeightsFile:
    """Open a file of weights, or a folder with such a file or with shards and their index.

    Raises:
      CheckpointError: the path holds no weights in a known format, or a file is damaged or unsafe.
    """
    source = locate(path) or Source(path)
    checksums.check_weights(source.path)
    if source.subtree:  # config.json describes the whole
        return WeightsFile(path, _open_one(source)[0], {})
    folder = source.path if source.path.is_dir() else source.path.parent
    is_transformers = folder == source.path and not _is_bv(folder)
    tensors, description = _open_folder(folder) if is_transformers else _open_one(source)
    if (folder / "config.json").is_file():
        description |= read_json(folder / "config.json")
        for name in (PROCESSOR, GENERATION):
            description |= {name: read_json(folder / name)} if (folder / name).is_file() else {}
    return WeightsFile(path, tensors, description)


def locate(path: Path) -> Source | None:
    """Return the file or the `.bv` folder that a path names, or None if there is neither."""
    pointer = path.with_name(path.name + POINTER) if path.name else path
    if path.is_file() or _is_bv(path):
        return Source(path)
    if pointer.is_file():
        return Source(_last_step(pointer))
    found = re.fullmatch(r"(.+):([\w/]+)", str(path))
    if found and not path.exists():
        whole = locate(Path(found[1]))
        return whole and whole._replace(subtree=found[2].strip("/"))
    return None


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


def _open_folder(path: Path) -> tuple[Tensors, Json]:
    """Return the tensors of a folder, and the description in the header of its file or first shard."""
    found = next((path / name for name in FILE_NAMES if (path / name).is_file()), None)
    files = [found] if found else sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(f"{path} has {len(files)} files of weights and no index of them; give one of them")
    if not files:
        raise CheckpointError(f"{path} has no weights: expected one of {', '.join(FILE_NAMES)}")
    if not files[0].name.endswith(INDEX_SUFFIX):
        return _open_one(Source(files[0]))
    places = shards(files[0], read_json(files[0]))
    opened = {name: _open_one(Source(path / name)) for name in sorted(set(places.values()))}
    if missing := [tensor for tensor, name in places.items() if tensor not in opened[name][0]]:
        raise CheckpointError(f"{files[0]}: {places[missing[0]]} has no {missing[0]}, which the index lists")
    return {tensor: opened[name][0][tensor] for tensor, name in places.items()}, next(iter(opened.values()))[1]


def _open_one(source: Source) -> tuple[Tensors, Json]:
    """Return the tensors of one file, whose first bytes determine the format, and the description in its header."""
    path = source.path
    if _is_bv(path):
        return _of_big_vision(_open_bv(path), source), {}
    if not path.is_file():  # opening a named pipe would block
        raise CheckpointError(f"no file {path}")
    with _errors_of(path), path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise CheckpointError(f"{path} is a pointer of Git LFS without the weights; fetch them: git lfs pull")
    if start[8:9] == b"{":
        return _open_safetensors(path)
    if start.startswith(ZIP_MAGIC) and not _is_torch(path):
        arrays = open_npz(path)
        with _errors_of(f"{path}: {OWN_KEY}", "a description of a model"):
            own = {OWN_KEY: json.loads(str(arrays[OWN_KEY].read()))} if OWN_KEY in arrays else {}
        return _of_big_vision(arrays, source), own
    return _open_torch(path), {}


@contextlib.contextmanager
def _errors_of(what: str | Path, kind: str = "a file of weights") -> Iterator[None]:
    """Context manager that turns errors of a file or an array into a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as e:
        raise CheckpointError(f"cannot read {what}: {e.strerror or first_line(e)}") from None
    except Exception as e:  # the libraries raise many types of exceptions for damaged content
        raise CheckpointError(f"{what} is not {kind}, or is damaged: {first_line(e):.200}") from None


def _open_safetensors(path: Path) -> tuple[Tensors, Json]:
    import safetensors

    with _errors_of(path, "a safetensors file"):
        file = safetensors.safe_open(path, framework="numpy")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        own = {key: json.loads(text) for key, text in (file.metadata() or {}).items() if key == OWN_KEY}

    def read(name: str) -> np.ndarray:
        # Opened again each time: an open file would keep all pages that were read in the memory of the process.
        with _errors_of(f"{path}: {name}", "an array"):
            array: np.ndarray = safetensors.safe_open(path, framework="numpy").get_tensor(name)
            return array

    return {name: Tensor(shapes[name], functools.partial(read, name)) for name in shapes}, own


def _is_torch(path: Path) -> bool:
    """Return True for a zip archive of PyTorch, whose members include a pickle of its structure."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:  # the reader of .npz reports the damage
        return any(name.endswith(TORCH_MEMBER) for name in archive.namelist())
    return False


def _open_torch(path: Path) -> Tensors:
    """Open a file that `torch.save` wrote, with PyTorch's reader that creates tensors and plain containers only."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path} is no safetensors or .npz file; to read a file of PyTorch: {INSTALL_TORCH}"
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
        with _errors_of(f"{path}: {name}", "an array"):  # but sparse, quantized, or of a dtype that numpy lacks
            if tensor.dtype == torch.bfloat16:  # numpy has no such dtype of its own
                return np.asarray(tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
            return np.asarray(tensor.numpy())

    return {
        str(name): Tensor(tuple(tensor.shape), functools.partial(read, str(name), tensor.detach()))
        for name, tensor in content.items()
    }


def open_npz(path: Path) -> dict[str, Tensor]:
    """Open the arrays of a `.npz` file by name; only the directory of the archive and the headers are read.

    numpy does not know bfloat16 and stores its bytes with the void dtype `V2`, which is read as bfloat16.

    Raises:
      CheckpointError: the file is not an archive, or a member is not an array. One that has Python objects or is
        damaged raises this error when the array is read.
    """
    found = {}
    with _errors_of(path, "an .npz archive"), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            with _errors_of(f"{path}: member {name!r}", "an array"), archive.open(info) as stream:
                version = np.lib.format.read_magic(stream)
                header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
                found[name] = Tensor(header(stream)[0], functools.partial(_read_npz, path, name, info))
    return found


def _read_npz(path: Path, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    what = f"{path}: member {name!r}"
    with _errors_of(what, "an array"), zipfile.ZipFile(path) as archive, archive.open(info) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):  # at the end of the data zipfile compares the checksum
            raise ValueError(f"its header announces {array.dtype} of {array.shape}, but it has more bytes")
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _last_step(pointer: Path) -> Path:
    """Return the folder of the last step, which the file `pointer` names."""
    with _errors_of(pointer, "a pointer to a step"):
        step = pointer.read_bytes().decode().strip()
    name = f"{pointer.name.removesuffix(POINTER)}-{step}"
    if not re.fullmatch(r"[\w-]+", step) or not pointer.with_name(name).is_dir():
        raise CheckpointError(f"{pointer} names step {step[:50]!r}, but there is no folder {name[:100]!r}")
    return pointer.with_name(name)


def _array_folders(path: Path) -> Iterator[Path]:
    """Return the folders of the arrays below `params` in a .bv folder; the optimizer's arrays are large and skipped."""
    children = sorted(path.glob(f"{ROOTS[0].replace('/', '~')}*"))
    return (child for child in children if (child / ".zarray").is_file())


def _is_bv(path: Path) -> bool:
    return path.is_dir() and next(_array_folders(path), None) is not None


def _open_bv(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a .bv folder by name; a missing chunk has the fill value, and is an error without one."""

    def opened(folder: Path, fill: bool = True) -> Any:
        kvstore = {"driver": "file", "path": str(folder.resolve())}  # TensorStore refuses ".." in a path
        spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": fill}
        return require("tensorstore").open(spec, read=True, open=True).result()

    def read(folder: Path, fill: bool) -> np.ndarray:
        with _errors_of(folder, "a zarr array"):
            return np.asarray(opened(folder, fill).read().result())

    found = {}
    for folder in _array_folders(path):
        with _errors_of(folder, "a zarr array"):
            array = opened(folder)
        fill = array.fill_value is not None
        found[folder.name.replace("~", "/")] = Tensor(tuple(array.shape), functools.partial(read, folder, fill))
    return found


def _of_big_vision(arrays: dict[str, Tensor], source: Source) -> dict[str, Tensor]:
    """Return the arrays below the root or subtree by today's names; the class token includes its position embedding.

    Raises:
      CheckpointError: there is no such subtree, or an array occurs under an old and a new name.
    """
    root = next((root for root in ROOTS if any(name.startswith(root) for name in arrays)), "")
    below = f"{root}{source.subtree}/" if source.subtree else root
    found = {name.removeprefix(below): array for name, array in arrays.items() if name.startswith(below)}
    if not found:
        known = sorted({name.removeprefix(root).split("/")[0] for name in arrays if name.startswith(root)})
        raise CheckpointError(f"{source.path} has no subtree {source.subtree!r}; it has {', '.join(known) or 'none'}")
    is_inlined = "probe" in found
    new = dict[str, Tensor]()
    for old, array in found.items():
        name = _new_name(old)
        if is_inlined and name.split("/")[0] in INLINED_HEAD:
            name = f"MAPHead_0/{name}"
        if name in new:
            raise CheckpointError(f"{source.path}: {old} is another array of {name}")
        new[name] = array
    cls, positions = new.get("cls"), new.get("pos_embedding")
    if cls and positions and len(positions.shape) == 3 and positions.shape[0] == 1:
        rows = positions.shape[1]
        if rows > 1 and math.isqrt(rows) ** 2 != rows and math.isqrt(rows - 1) ** 2 == rows - 1:
            new["cls"] = Tensor(cls.shape, lambda: _float32(cls) + _float32(positions)[:, :1])
            new["pos_embedding"] = Tensor((1, rows - 1, positions.shape[2]), lambda: positions.read()[:, 1:])
    return new


def _new_name(name: str) -> str:
    if name in OLD_POSITIONS:
        return "pos_embedding"
    parts = name.split("/")
    if len(parts) > 3 and parts[0] == "Transformer" and parts[1].startswith("encoderblock"):
        parts[2] = BEFORE_LINEN.get(parts[2], parts[2])
    return "/".join(parts)


def _float32(tensor: Tensor) -> np.ndarray:
    return tensor.read().astype(np.float32)
