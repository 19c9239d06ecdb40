"""Shards and their index as safetensors and transformers write them, complete or absent."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from refusals import refused

from dcvit.errors import CheckpointError
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import open_file

TENSORS = {
    "z/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "columns": np.asfortranarray(np.arange(24, dtype=np.int32).reshape(2, 3, 4)),
    "half": np.arange(5).astype(ml_dtypes.bfloat16),
    "scalar": np.float32(3.5),
    "empty": np.zeros((0, 3), np.float16),
    "flags": np.array([True, False]),
}


@pytest.mark.parametrize("max_bytes", [1 << 20, 60])
def test_every_tensor_is_read_back_with_its_bits_from_one_file_or_shards(tmp_path, max_bytes):
    write_shards(tmp_path, iter(TENSORS.items()), max_shard_bytes=max_bytes)
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_bytes > 60:
        assert files == ["model.safetensors"]
    else:
        count = len(files) - 1
        shards = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        assert files == [*shards, "model.safetensors.index.json"]
        assert count > 2
    read = {name: tensor.read() for name, tensor in open_file(tmp_path).tensors.items()}
    assert read.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(read[name], array, strict=True)
    with refused(CheckpointError, "two tensors have the name columns"):
        write_shards(tmp_path, iter([*TENSORS.items(), ("columns", np.zeros(3))]), max_shard_bytes=max_bytes)


@pytest.mark.interop
@pytest.mark.slow
def test_the_index_lists_sizes_and_files_as_hugging_face_does(tmp_path):
    torch = pytest.importorskip("torch", reason="needs PyTorch; pip install -e .[interop]")
    hub = pytest.importorskip("huggingface_hub", reason="needs transformers; pip install -e .[interop]")
    arrays = {f"layer.{i}.weight": np.full((8, 8), i, np.float32) for i in range(5)}
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    write_shards(tmp_path / "ours", iter(arrays.items()), max_shard_bytes=512)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    hub.save_torch_state_dict(tensors, tmp_path / "theirs", max_shard_size=512)
    ours, theirs = ({p.name: p for p in (tmp_path / side).iterdir()} for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    index = json.loads(theirs["model.safetensors.index.json"].read_text())
    found = json.loads(ours["model.safetensors.index.json"].read_text())
    assert found["weight_map"] == index["weight_map"]
    assert found["metadata"]["total_size"] == index["metadata"]["total_size"] == 5 * 256
    for name in set(ours) - {"model.safetensors.index.json"}:
        with safetensors.safe_open(ours[name], "np") as a, safetensors.safe_open(theirs[name], "np") as b:
            assert a.metadata()["format"] == b.metadata()["format"] == "pt"


def test_one_shard_is_in_memory_at_a_time(tmp_path):
    size, count, per_shard = 1 << 20, 24, 4

    tracemalloc.start()
    try:
        write_shards(
            tmp_path, ((f"t{i}", np.full(size, i, np.uint8)) for i in range(count)), max_shard_bytes=per_shard * size
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(list(tmp_path.glob("*.safetensors"))) == count // per_shard
    assert peak < (per_shard + 1) * size + 100_000
