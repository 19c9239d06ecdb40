"""The op `patches` yields the patches of transformers' image processor of SigLIP 2 (NaFlex)."""

import numpy as np
import pytest
from PIL import Image

from input_pipeline import Preprocess

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("size", [(30, 50), (200, 64), (16, 300), (97, 97)])
def test_patches_are_those_of_siglip2(size):
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    theirs = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=40)(Image.fromarray(image), return_tensors="np")
    spec = "patches(16, 40, upscale=True)|value_range(-1, 1)"
    ours = Preprocess(spec)({"image": image}, np.random.default_rng(0))
    assert ours["grid"].tolist() == theirs["spatial_shapes"][0].tolist()
    real = np.prod(ours["grid"])
    np.testing.assert_allclose(ours["image"].reshape(40, -1)[:real], theirs["pixel_values"][0][:real], atol=1e-6)
