"""Conversion and loading tensor by tensor: sharded arrays on devices, and the memory of the host."""

import functools
import json
import math
import weakref
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
import small_models
from foreign_models import tensors_of
from ml_collections import ConfigDict
from small_models import param_shapes

import dcvit
from dcvit.config import values
from dcvit.errors import CheckpointError
from dcvit.hub.kinds import make_model
from dcvit.models import lm
from dcvit.models.trees import unstack_blocks
from dcvit.parallel.sharding import make_mesh, shardings
from dcvit.training.model import make_loader
from dcvit.weights import links as linking
from dcvit.weights.families import open_weights
from dcvit.weights.placement import layer_checksums, place_params
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import Tensor


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A LLaMA model in files of bfloat16, and its parameters as shapes."""
    width, depth, mlp, vocab = 32, 2, 64, 48
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for i in range(depth):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (width, mlp)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    folder = tmp_path_factory.mktemp("llama")
    write_shards(folder, iter(tensors.items()), max_shard_bytes=20_000)
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": depth,
        "num_attention_heads": 8, "intermediate_size": mlp, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
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
    arrays = place_params(weights.params, like, "file")
    for path, array in jax.tree.leaves_with_path(arrays):
        target = like
        for key in path:
            target = target[key.key]
        assert (array.sharding, array.dtype) == (target.sharding, np.float32)
    for a, b in zip(jax.tree.leaves(arrays), jax.tree.leaves(weights.tree()), strict=True):
        np.testing.assert_array_equal(a, b.astype(np.float32))
    largest = max(a.addressable_shards[0].data.nbytes / a.nbytes for a in jax.tree.leaves(arrays) if a.ndim > 1)
    assert largest == (1 if strategy == "ddp" else 1 / 8)


@pytest.fixture
def reads(monkeypatch):
    """Count the reads of tensors, and the bytes that are held at once of what was read."""
    found = {"names": [], "held": 0, "peak": 0}
    parameters = linking.parameters

    def release(size):
        found["held"] -= size

    def counted(name, tensor):
        array = tensor.read().copy()
        found["names"].append(name)
        found["held"] += array.nbytes
        found["peak"] = max(found["peak"], found["held"])
        weakref.finalize(array, release, array.nbytes)
        return array

    def all_counted(links, tensors):
        reading = {name: Tensor(x.shape, functools.partial(counted, name, x)) for name, x in tensors.items()}
        return parameters(links, reading)

    monkeypatch.setattr(linking, "parameters", all_counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "compose"), [(False, None), (True, "both")])
def test_a_run_starts_from_one_tensor_at_a_time_on_eight_devices(small, reads, scan, compose):
    """Each tensor is read once and released before the next; the parameters are in their shards."""
    folder = small[0].path
    fields = {**small[0].description.fields, "scan": scan, "compose": compose}
    load = {"upcycle": True} if compose else {}
    config = ConfigDict({**values.defaults(), "model_name": "lm", "vocab_size": 48, "model": fields,
                         "model_init": str(folder), "model_load": load})  # fmt: skip
    net = make_model(config)
    shapes = param_shapes(net, jax.ShapeDtypeStruct((1, 2), np.int32))
    like = targets(shapes, make_mesh([("fsdp", 8)]), "fsdp")
    loaded = make_loader(config, net, like)(like)
    tensors = tensors_of(open_weights(folder))
    assert sorted(reads["names"]) == sorted(tensors)
    assert reads["held"] == 0
    assert reads["peak"] == max(2 * math.prod(tensor.shape) for tensor in tensors.values())  # of bfloat16
    expected = small[0].tree()
    found = unstack_blocks(loaded)
    for path, array in jax.tree.leaves_with_path(found):
        np.testing.assert_array_equal(array, functools.reduce(lambda t, k: t[k.key], path, expected).astype(np.float32))
    arrays = {small_models.name_of(path): array for path, array in jax.tree.leaves_with_path(loaded)}
    places = {small_models.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(like)}
    assert all(array.sharding == places[path].sharding for path, array in arrays.items())
    assert {path for path in places if path not in arrays} == {path for path in places if "/w_" in path}


def test_the_model_of_dcvit_load_is_read_one_tensor_at_a_time(small, reads):
    model = dcvit.load(small[0].path, sharding="fsdp")
    assert reads["peak"] == 2 * 64 * 32 == max(2 * math.prod(x.shape) for x in tensors_of(small[0]).values())
    assert not model.params["embedding"]["embedding"].sharding.is_fully_replicated


def test_an_array_of_several_layers_is_read_once_for_its_checksums():
    reads = []

    def tensor(name, *shape):
        array = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
        return Tensor(shape, lambda: reads.append(name) or array), array

    stack, kernels = tensor(name := "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel", 3, 2, 4)
    one, bias = tensor("head/bias", 5)
    expected = {name.replace("block/", f"block_{i}/"): zlib.crc32(kernels[i].tobytes()) for i in range(3)}
    found = layer_checksums({name: stack, "head/bias": one})
    assert found == {**expected, "head/bias": zlib.crc32(bias.tobytes())}
    assert reads == [name, "head/bias"]


def test_a_stack_with_a_missing_layer_is_refused_before_anything_is_read(small):
    weights, _ = small
    net = lm.Model(48, **{**weights.description.fields, "scan": True})
    shapes = param_shapes(net, jax.ShapeDtypeStruct((1, 2), np.int32))
    unreadable = {name: Tensor(tensor.shape, None) for name, tensor in weights.params.items()}
    unreadable.pop(name := "Transformer/decoderblock_0/mlp_norm/scale")
    with pytest.raises(CheckpointError, match=f"; 1 only in the model: {name}$"):
        place_params(unreadable, shapes, "file")
