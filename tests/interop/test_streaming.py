"""Conversion and loading tensor by tensor: sharded arrays on devices, and the memory of the host."""

import json
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from dcvit.errors import CheckpointError
from dcvit.interop.safetensors_writer import write_shards
from dcvit.interop.weights import open_weights
from dcvit.models import lm
from dcvit.parallel.sharding import make_mesh, shardings


def llama_folder(folder, *, width, depth, mlp, vocab, dtype, max_shard_bytes):
    """Write a LLaMA model with random weights, one tensor at a time; return its largest tensor in bytes."""
    largest = 0
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for i in range(depth):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (width, mlp)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}

    def tensors():
        nonlocal largest
        rng = np.random.default_rng(0)
        for name, shape in shapes.items():
            array = rng.standard_normal(shape, np.float32).astype(dtype)
            largest = max(largest, array.nbytes)
            yield name, array

    folder.mkdir()
    write_shards(folder, tensors(), max_shard_bytes=max_shard_bytes)
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": depth,
        "num_attention_heads": 8, "intermediate_size": mlp, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return largest


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of bfloat16, and the model's parameters as shapes."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    llama_folder(folder, width=32, depth=2, mlp=64, vocab=48, dtype=ml_dtypes.bfloat16, max_shard_bytes=20_000)
    weights = open_weights(folder)
    net = lm.Model(48, **weights.description.fields)
    return weights, jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32))["params"]


def targets(shapes, mesh, strategy):
    placed = shardings(shapes, mesh, strategy)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placed)


@pytest.mark.parametrize(
    ("axes", "strategy"),
    [([("fsdp", 8)], "fsdp"), ([("fsdp", 2), ("tensor", 4)], "fsdp+tensor"), ([("data", 8)], "ddp")],
)
def test_parameters_are_placed_on_eight_devices_as_the_strategy_says(small, axes, strategy):
    weights, shapes = small
    like = targets(shapes, make_mesh(axes), strategy)
    arrays = weights.arrays(like)
    for path, array in jax.tree.leaves_with_path(arrays):
        target = like
        for key in path:
            target = target[key.key]
        assert (array.sharding, array.dtype) == (target.sharding, np.float32)
    for a, b in zip(jax.tree.leaves(arrays), jax.tree.leaves(weights.tree()), strict=True):
        np.testing.assert_array_equal(a, b.astype(np.float32))
    largest = max(a.addressable_shards[0].data.nbytes / a.nbytes for a in jax.tree.leaves(arrays) if a.ndim > 1)
    assert largest == (1 if strategy == "ddp" else 1 / 8)


def test_parameters_that_do_not_fit_are_listed_before_any_is_read(small):
    weights, shapes = small
    like = targets(shapes, make_mesh([("data", 8)]), "ddp")
    head = jax.tree.map(lambda x: x, {**like, "head": {"kernel": like["embedding"]["embedding"]}})
    with pytest.raises(CheckpointError, match=r"1 only in the model: head/kernel"):
        weights._replace(tensors={}).arrays(head)
    wide = {**like, "embedding": {"embedding": head["head"]["kernel"].update(shape=(49, 32))}}
    with pytest.raises(CheckpointError, match=r"embedding/embedding \(checkpoint \(48, 32\), model \(49, 32\)\)"):
        weights.arrays(wide)


CONVERT = """
import re, sys, threading, time
from pathlib import Path
from dcvit.interop.safetensors_writer import write_shards
from dcvit.interop.weights import open_weights

def anonymous():  # bytes; pages of mapped files do not count, because the kernel can drop them
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

source, out, max_shard_bytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
before = peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
write_shards(out, open_weights(source).params(), max_shard_bytes=max_shard_bytes)
print(peak - before)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")  # noqa: PTH110
def test_a_conversion_needs_the_memory_of_one_shard_and_two_tensors(tmp_path):
    """800 MB in shards of 200 MB: at most 1.3 times a shard, and the largest tensor twice (read and converted)."""
    shard = 200 << 20
    largest = llama_folder(
        tmp_path / "in", width=2048, depth=5, mlp=5632, vocab=4000, dtype=np.float32, max_shard_bytes=shard
    )
    files = sorted((tmp_path / "in").glob("*.safetensors"))
    assert len(files) >= 4
    assert largest > 40 << 20
    (tmp_path / "out").mkdir()
    arguments = [sys.executable, "-c", CONVERT, str(tmp_path / "in"), str(tmp_path / "out"), str(shard)]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    peak = int(process.stdout)
    largest_shard = max(file.stat().st_size for file in files)
    print(
        f"peak {peak / 2**20:.0f} MiB, largest shard {largest_shard / 2**20:.0f} MiB, tensor {largest / 2**20:.0f} MiB"
    )
    assert 0.5 * largest_shard < peak < 1.3 * largest_shard + 2 * largest
