"""Results of packed images equal those of each image alone, for every position embedding, pooling and attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.errors import ConfigError
from dcvit.models import losses, vit
from dcvit.models.packed_images import PackedImages, one_per_row, pack
from dcvit.parallel import hlo
from dcvit.parallel.sharding import batch_sharding, make_mesh
from input_pipeline import Preprocess
from input_pipeline.preprocess.packing import Packing, place

PATCH, TOKENS, CLASSES, SIDE = 2, 9, 3, 3
GRIDS = [(2, 3), (1, 2), (3, 3), (2, 3), (3, 3), (1, 2)]
PACKING = Packing(images=3, rows=2, tokens=11)


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (rows * PATCH, columns * PATCH, 3), np.uint8) for rows, columns in GRIDS]


@pytest.fixture(scope="module")
def sequences(images) -> tuple[jax.Array, jax.Array]:
    preprocess = Preprocess(f"patches({PATCH}, {TOKENS})|value_range(-1, 1)")
    found = [preprocess({"image": image}, np.random.default_rng(0)) for image in images]
    return tuple(jnp.asarray(np.stack([example[key] for example in found])) for key in ("image", "grid"))


def packed_rows(sequences, packing=PACKING, seed=0) -> PackedImages:
    patches, grid = sequences
    return jax.jit(pack, static_argnums=4)(
        jax.random.key(seed), patches, grid, jnp.asarray(place(np.prod(grid, axis=1).tolist(), packing)), packing
    )


def model_and_params(**fields):
    sizes = {"width": 16, "depth": 1, "num_heads": 4, "mlp_dim": 16, "patch_size": (PATCH, PATCH), "posemb": "rotary2d"}
    net = vit.Model(CLASSES, **{**sizes, "head_zeroinit": False, **fields})
    side = SIDE * PATCH
    params = jax.jit(net.init)(jax.random.key(1), jnp.zeros((1, side, side, 3)))["params"]
    noise = [0.1 * np.random.default_rng(i).normal(size=x.shape) for i, x in enumerate(jax.tree.leaves(params))]
    noise = jax.tree.unflatten(jax.tree.structure(params), [jnp.asarray(x, jnp.float32) for x in noise])
    return net, jax.tree.map(jnp.add, params, noise)


def alone(net, params, images) -> jax.Array:
    """Return the logits of each image, computed from the image itself at its own size."""

    def logits(image: np.ndarray) -> jax.Array:
        own = params
        if "pos_embedding" in params:
            grid = (image.shape[0] // PATCH, image.shape[1] // PATCH)
            own = {**params, "pos_embedding": vit.resample_grid(params["pos_embedding"], (SIDE, SIDE), grid)}
        return net.apply({"params": own}, jnp.asarray(image[None] / 127.5 - 1, jnp.float32))[0][0]

    chosen = jax.jit(lambda: [logits(image) for image in images[:3]])()
    return jnp.stack(chosen)


@pytest.mark.parametrize(
    "fields",
    [
        {"posemb": "learn", "compose": "both"},
        {"pool_type": "map", "heads": "folded"},
        {"pool_type": "tok+gap", "registers": 2, "posemb": "sincos2d"},
        {"pool_type": "tok+reg", "registers": 1, "heads": "lightweight", "depth": 2, "scan": True, "remat": "full"},
    ],
    ids=str,
)
def test_packed_images_equal_each_image_alone(fields, images, sequences):
    net, params = model_and_params(**fields)
    apply = jax.jit(lambda *inputs: [net.apply({"params": params}, each)[0] for each in inputs])
    packed, padded = apply(packed_rows(sequences), one_per_row(*sequences))
    np.testing.assert_allclose(padded, packed, atol=1e-5)
    np.testing.assert_allclose(alone(net, params, images), packed[:3], atol=1e-5)


@pytest.mark.slow
def test_gradients_of_packed_images_equal_those_of_padded_rows(sequences):
    net, params = model_and_params(compose="both", posemb="learn")
    labels = jnp.eye(CLASSES)[jnp.arange(len(GRIDS)) % CLASSES]

    def loss(params, inputs):
        return jnp.mean(losses.softmax_xent(net.apply({"params": params}, inputs)[0], labels))

    gradient = jax.jit(jax.grad(loss))
    for packed, padded in zip(
        jax.tree.leaves(gradient(params, packed_rows(sequences))),
        jax.tree.leaves(gradient(params, one_per_row(*sequences))),
        strict=True,
    ):
        np.testing.assert_allclose(packed, padded, atol=1e-5)


def test_images_of_a_row_do_not_influence_each_other(sequences):
    """The gradient of one image's logits is zero for the pixels of all others, and for padding."""
    net, params = model_and_params(compose="both", pool_type="map", registers=1)
    packed = packed_rows(sequences)

    def logit(patches: jax.Array, image: int) -> jax.Array:
        return jnp.sum(net.apply({"params": params}, packed._replace(patches=patches))[0][image])

    for image in (0, 5):
        gradient = np.abs(jax.jit(jax.grad(logit))(packed.patches, image)).sum(axis=(-1, -2))
        group, member = divmod(image, PACKING.images)
        row, segment = divmod(int(packed.slots[group, member]), PACKING.most())
        own = np.zeros(gradient.shape, bool)
        own[group, row] = np.asarray(packed.segments)[group, row] == segment
        assert own.sum() == np.prod(GRIDS[image])
        assert (gradient[own] > 0).all()
        assert not gradient[~own].any()


def test_packed_rows_hold_each_patch_once_in_order(sequences):
    patches, grid = sequences
    packed = packed_rows(sequences)
    for image, (rows, columns) in enumerate(grid.tolist()):
        group, member = divmod(image, PACKING.images)
        row, segment = divmod(int(packed.slots[group, member]), PACKING.most())
        own = np.asarray(packed.segments[group, row] == segment)
        np.testing.assert_array_equal(packed.patches[group, row][own], patches[image, : rows * columns])
        np.testing.assert_array_equal(packed.positions[group, row][own], np.argwhere(np.ones((rows, columns))))
        assert packed.grids[group, row, segment].tolist() == [rows, columns]


def test_images_without_room_lose_random_tokens_by_the_key(sequences):
    patches, grid = sequences
    small = Packing(images=3, rows=1, tokens=12)
    sizes = np.prod(grid, axis=1)
    kept = place(sizes.tolist(), small)[:, 3]
    assert kept.tolist() == [5, 2, 5, 5, 5, 2]
    one, again, other = (packed_rows(sequences, small, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.positions, again.positions)
    assert (np.asarray(one.positions) != np.asarray(other.positions)).any()
    for image in range(len(GRIDS)):
        group, member = divmod(image, small.images)
        own = np.asarray(one.segments[group, 0]) == int(one.slots[group, member])
        positions = np.asarray(one.positions[group, 0])[own]
        numbers = positions @ np.asarray([GRIDS[image][1], 1])
        assert len(numbers) == kept[image]
        assert (np.diff(numbers) > 0).all()  # different tokens, in order
        np.testing.assert_array_equal(one.patches[group, 0][own], np.asarray(patches)[image][numbers])


def test_stochastic_depth_drops_images_instead_of_rows(sequences):
    net, params = model_and_params(depth=2, stochastic_depth=0.5)
    packed = packed_rows(sequences)

    def blocks(key):
        return net.apply({"params": params}, packed, train=True, rngs={"dropout": key})[1]["encoder"]["block01"]

    mixed = False
    for seed in range(4):
        out = jax.jit(blocks)(jax.random.key(seed))
        dropped = np.asarray(out["+mlp"] == out["+sa"]).all(axis=-1)
        segments = np.asarray(packed.segments).reshape(dropped.shape)
        for row, ids in zip(dropped, segments, strict=True):
            images = [set(row[ids == k].tolist()) for k in np.unique(ids)]
            assert all(len(found) == 1 for found in images)  # all tokens of an image, or none
            mixed |= len(set.union(*images)) == 2
    assert mixed  # not all images of a row


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"pool_type": "none"}, "pool_type='none' is for images of one size"),
        ({"patch_size": (1, 4)}, r"patch_size=\(1, 4\), but the op patches yields patches of 4 pixels"),
    ],
)
def test_models_that_do_not_take_packed_images_are_refused(fields, match, sequences):
    net = vit.Model(CLASSES, **{"width": 16, "depth": 1, "num_heads": 4, "patch_size": (PATCH, PATCH), **fields})
    with pytest.raises(ConfigError, match=match):
        jax.eval_shape(net.init, jax.random.key(0), one_per_row(*sequences))


@pytest.mark.slow
def test_packing_on_several_devices_needs_no_communication(sequences):
    """Each device packs its own groups of images."""
    mesh = make_mesh([("data", 2)], jax.devices()[:2])
    patches, grid = jax.device_put(sequences, batch_sharding(mesh))
    places = jax.device_put(place(np.prod(grid, axis=1).tolist(), PACKING), batch_sharding(mesh))
    compiled = jax.jit(pack, static_argnums=4).lower(jax.random.key(0), patches, grid, places, PACKING).compile()
    assert hlo.collectives(compiled.as_text()) == []
