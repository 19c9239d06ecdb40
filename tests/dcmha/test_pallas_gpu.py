"""The GPU kernels: interpreted and compared with the reference, and lowered for the models of the presets.

The interpreter executes the ring of shared-memory slots and its barriers (`gpu_interpreter`). Lowering, which needs no
GPU, checks the layouts of registers. `dcvit check-kernels` compares the kernels with the reference on a GPU.
"""

import functools

import gpu_kernels
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    call_of,
    on_arrays,
    output_and_gradients,
    queries_with_nan,
    random_case,
    relative_errors,
    worst,
)
from gpu_interpreter import interpreted
from pallas_checks import weights_like

from dcvit.dcmha.backends.gpu import api, launch, tiling
from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.inputs import Inputs, Options, UnsupportedError
from dcvit.models.presets import PRESETS

CASES = {
    "grouped queries, padding": {"queries": 50, "keys": 20, "key_heads": 1, "head_dim": 24, "rank": 1},
    "masks": {"queries": 8, "keys": 20, "batch": 2, "branches": "kpg", "post": None, "mask": (2, 1, 1, 20)},
    "segments": {"queries": 12, "keys": 20, "batch": 2, "branches": "qg", "post": None, "segments": 3},
    "groups": {"queries": 8, "heads": 4, "rank": 1, "groups": 2, "branches": "qp", "post": None},
    # Six heads fill the slots of the ring again; in the first case these are three.
    "causal": {"queries": 20, "heads": 6, "rank": 1, "causal": True, "branches": None, "post": "kpg"},
    "four slots": {"queries": 12, "heads": 6, "rank": 1, "branches": None, "post": "kpg"},
    "local blocks": {"queries": 130, "window": 40, "branches": "qg", "post": None, "rank": 1, "segments": 3},
    # Queries from 15 on attend to no key.
    "window after the keys, absent branches": {
        "queries": 132, "keys": 10, "window": 6, "branches": "kg", "post": None, "mask": (1, 1, 1, 10),
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "causal" else pytest.mark.weekly) for n in CASES])
def test_output_and_gradients_equal_the_reference(name, monkeypatch):
    if name == "causal":
        monkeypatch.setattr(tiling, "max_stages", lambda config, pairs: 3)
    if name != "grouped queries, padding":
        monkeypatch.setattr(tiling, "WARPGROUPS", 1)
    monkeypatch.setattr(tiling, "ROWS_WINDOW", 64)
    args, options = random_case(**{"head_dim": 16, "dtype": jnp.bfloat16, **CASES[name]})
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    right = output_and_gradients(on_arrays(reference.run), wide, options)
    with interpreted():
        found = output_and_gradients(on_arrays(api.run), args, options)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(found))
    errors = relative_errors(found, right)
    assert worst(errors) < 2e-2, errors
    if "after the keys" in name:
        assert not np.asarray(found[0][:, 15:]).any()


PARTS = {  # case, bytes of the workspace, and parts of the backward pass: examples, queries
    "causal blocks of two lengths": ({"queries": 196, "keys": 190, "causal": True}, 2**30, (1, 64)),
    "local blocks after keys": ({"queries": 260, "keys": 90, "window": 70, "mask": (1, 1, 1, 90)}, 2**30, (1, 64)),
    "examples": ({"queries": 70, "batch": 6, "segments": 3, "mask": (1, 1, 70, 70)}, 4_000_000, (3, 128)),
    "queries": ({"queries": 300, "keys": 200, "mask": (1, 1, 300, 200), "batch": 2}, 2_500_000, (1, 128)),
    "groups": ({"queries": 130, "heads": 8, "groups": 4, "key_heads": 4, "batch": 2, "segments": 3}, 2**30, (2, 192)),
}


@pytest.fixture
def in_jax(monkeypatch):
    """Let plain JAX, in float32, take the place of the kernels; the list gets kind and configuration of each call."""
    found = []

    def launched(kind, config, operands):
        found.append((kind, config))
        return gpu_kernels.launch(kind, config, operands)

    monkeypatch.setattr(api, "launch", launched)
    monkeypatch.setattr(api, "check_supported", lambda call: None)  # which refuses float32
    return found


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_of_a_layer_give_its_output_and_gradients(name, in_jax, monkeypatch):
    """Each output of the kernels fits into the workspace."""
    case, limit, expected = PARTS[name]
    sizes, chosen = [], tiling.partition
    monkeypatch.setattr(api, "partition", lambda *a, **k: sizes.append(chosen(*a, **k)) or sizes[-1])
    for constant, value in {"ROWS_CAUSAL": 64, "ROWS_WINDOW": 64, "KEY_LENGTHS": 2, "WORKSPACE_BYTES": limit}.items():
        monkeypatch.setattr(tiling, constant, value)
    args, options = random_case(**case)
    right = output_and_gradients(on_arrays(reference.run), args, options)
    found = output_and_gradients(on_arrays(api.run), args, options)
    errors = relative_errors(found, right)
    assert worst(errors) < 3e-5, errors
    shapes = [launch.output_shapes(config, kind).values() for kind, config in in_jax]
    assert max(sum(x.size * x.dtype.itemsize for x in each) for each in shapes) <= limit
    assert sizes[-1] == expected


@pytest.mark.parametrize("place", ["q", "k", "k1"])
def test_nan_reaches_the_queries_that_attend_with_it_through_all_rectangles(place, in_jax, monkeypatch):
    monkeypatch.setattr(tiling, "ROWS_WINDOW", 64)
    found = queries_with_nan(api.run, place, 300, 150, 70, rank=1)
    assert found == ([150] if place[0] == "q" else list(range(150, 220)))


@pytest.mark.weekly
@pytest.mark.parametrize("place", ["q", "k"])
def test_nan_reaches_the_queries_that_attend_with_it_in_the_kernels(place, monkeypatch):
    monkeypatch.setattr(tiling, "WARPGROUPS", 1)
    with interpreted():
        found = queries_with_nan(api.run, place, 20, 10, 5, rank=1, dtype=jnp.bfloat16)
    assert found == ([10] if place[0] == "q" else list(range(10, 15)))


def test_a_layer_whose_smallest_part_does_not_fit_is_refused_with_the_numbers():
    q, k, v, *weights = layer("DCPythia-6.9B", 262_144)
    message = "need 2,.* MiB for 64 queries of one example, 32 heads and 262,144 keys, found a limit of 1,024 MiB"
    with pytest.raises(UnsupportedError, match=message):
        tiling.check_supported(call_of(Inputs(q, k, v, *weights), Options(causal=True)))


@pytest.mark.parametrize(("masks", "examples"), [(1, 256), (256, 128)])
def test_a_mask_of_all_examples_takes_its_memory_once(masks, examples):
    """So that the gradients of 256 images of ViT-S/16 are computed at once, not in parts that are copied."""
    images = jax.tree.map(lambda x: jax.ShapeDtypeStruct((256, *x.shape[1:]), x.dtype), layer("DCViT-S", 196))
    mask = jax.ShapeDtypeStruct((masks, 1, 196, 196), bool)
    assert tiling.partition(Inputs(*images, mask), Options(), backward=True) == (examples, 256)


def layer(preset, tokens, dtype=jnp.bfloat16):
    """ShapeDtypeStructs of one attention layer's arguments q, k, v, pre, post."""
    fields = PRESETS.get(preset, {"num_heads": 6, "width": 384})
    heads = fields["num_heads"]
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, weights = array(1, tokens, heads, fields["width"] // heads), weights_like(array, 1, tokens, tokens, heads)
    return q, q, q, weights, weights


def forward_and_backward(cotangent, *args, **options):
    out, vjp = jax.vjp(lambda *a: on_arrays(api.run)(*a, **options), *args)
    return out, vjp(cotangent)


def for_cuda(function, *args):
    """The program of a function as it is exported for NVIDIA GPUs, which names its custom calls."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "mosaic_gpu")]
    return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "tokens", "window"),
    [("DCViT-S", 196, None), pytest.param("DCPythia-6.9B", 256, 256, marks=pytest.mark.weekly)],
)
def test_all_kernels_are_lowered_for_cuda(preset, tokens, window):
    args = layer(preset, tokens)
    both = functools.partial(forward_and_backward, causal=window is not None, window=window)
    text = for_cuda(both, args[0], *args)
    for kind in ("statistics", "weights", "post_grad", "pre_grad"):
        assert f"dcmha_{kind}" in text


@pytest.fixture
def launches(monkeypatch):
    """Let the layer call no kernels; the list gets kind, configuration and operands of each distinct one."""
    found = []

    def record(kind, config, operands):
        key = kind, config, jax.tree.map(lambda x: (x.shape, x.dtype), operands)
        found.extend([key] * (key not in found))
        return launch.Results(**{n: jnp.zeros(x.shape, x.dtype) for n, x in launch.output_shapes(config, kind).items()})

    monkeypatch.setattr(api, "launch", record)
    return found


@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("tokens", [2048, 5000, 131_072])
def test_the_number_of_kernels_does_not_grow_with_the_length(tokens, window, launches):
    q, k, v, *weights = layer("DCPythia-1.4B", tokens)
    jax.eval_shape(lambda *x: forward_and_backward(x[0], *x, causal=True, window=window), q, k, v, *weights)
    assert len(launches) == (16 if window is None else 4)


def test_the_keys_of_a_causal_layer_are_at_most_a_quarter_more_than_those_of_its_blocks():
    """The share of pairs that the kernels' arrays hold; blocks without an attended key are not computed."""
    for tokens in (512, 2048, 5000, 8192, 32_768):
        args, options = layer("DCPythia-1.4B", tokens), Options(causal=True)
        config = tiling.make_config(Inputs(*args), options, 512, backward=True)
        held = sum(len(span.blocks) * span.keys for span in tiling.spans(tokens, tokens, options, config))
        needed = sum(min(stop, tokens) for stop in range(512, tokens + 512, 512))
        assert needed <= held <= 1.25 * needed + 512


def test_every_preset_with_dynamic_composition_is_supported():
    names = [name for name, fields in PRESETS.items() if "compose" in fields and "groups" not in fields]  # not folded
    assert names
    for name in names:
        jax.eval_shape(lambda *x: tiling.check_supported(call_of(Inputs(*x))), *layer(name, 2048))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"branches": None, "post": "s"}, "do not support a static projection"),
        ({"rank": 5}, "ranks up to 4, found 5"),
        ({"head_dim": 136}, "up to 128 dimensions, found 136"),
        ({"dtype": jnp.float32}, "bfloat16, found float32"),
        ({"branches": None}, "need a composition"),
    ],
)
def test_unsupported_cases_raise_a_reason_of_one_line(change, message):
    args, options = random_case(**{"queries": 4, "dtype": jnp.bfloat16, **change})
    with pytest.raises(UnsupportedError, match=message) as raised:
        on_arrays(api.run)(*args, **options)
    assert "\n" not in str(raised.value)
