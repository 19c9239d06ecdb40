"""Files of weights: which file of a folder is read, where its description is, and what is refused in descriptions."""

import json

import numpy as np
import pytest
from conversion_models import image_model
from refusals import refused

from dcvit.errors import CheckpointError
from dcvit.weights import names, own, timm_vit
from dcvit.weights.families import open_weights
from dcvit.weights.family import Description
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import open_file

ARRAYS = {"head/kernel": np.ones((8, 4), np.float32), "norm/scale": np.ones(8, np.float32)}
DESCRIPTION = Description("vit", 4, dict(width=8, depth=1, num_heads=2, pool_type="tok"), "decode")


@pytest.mark.parametrize("max_shard_bytes", [1 << 20, 1000])
def test_the_header_describes_a_folder_without_config(tmp_path, max_shard_bytes):
    """Without the description, names such as those of big_vision are another model."""
    model = image_model()[2]
    arrays = ((name, tensor.read()) for name, tensor in model.params.items())
    write_shards(tmp_path, arrays, max_shard_bytes=max_shard_bytes, metadata=own.metadata(model.description))
    weights = open_weights(tmp_path)
    assert (weights.family, weights.description) == ("own", model.description)


def test_an_index_without_names_of_files_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ".."}}))
    with pytest.raises(CheckpointError, match="no file"):
        open_file(tmp_path)


def test_a_description_of_no_model_is_refused(tmp_path):
    description = own.to_json(DESCRIPTION._replace(fields={"width": [1]}))
    write_shards(tmp_path, iter(ARRAYS.items()), metadata={"dcvit": json.dumps(description)})
    with refused(CheckpointError, "width=(1,) should be of type int"):
        open_weights(tmp_path)


def test_a_config_of_the_modeling_file_is_checked(tmp_path):
    write_shards(tmp_path, iter(ARRAYS.items()))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dcvit", "num_heads": 5}))
    with pytest.raises(CheckpointError, match="num_heads=5 does not divide width=768"):
        open_weights(tmp_path)


GENERATION = "generation_config.json"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ()),
        ({"id2label": {"1": "b", "0": "a", "2": "c"}}, ("a", "b", "c")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, ()),
        ({"label_names": ["n1", "n2", "n3"], "label_descriptions": {"n1": "x", "n3": "y"}}, ("x", "n2", "y")),
        ({"pretrained_cfg": {"label_names": {"2": "c"}}}, ("0", "1", "c")),
        ({"id2label": {"0": "a"}}, "id2label={'0': 'a'}; expected a name for each of the 3 classes"),
    ],
)  # fmt: skip
def test_class_names_of_other_libraries(config, expected):
    if isinstance(expected, tuple):
        assert names.class_names(config, 3) == expected
        assert names.class_names(config, 0) == ()
    else:
        with refused(CheckpointError, expected):
            names.class_names(config, 3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ()),
        ({"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 2, GENERATION: {"eos_token_id": [3, 9, 70]}}, (3, 9)),
        ({"eos_token_id": 2, GENERATION: {}}, (2,)),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id='</s>'; expected a token"),
    ],
)
def test_tokens_that_end_a_text_of_transformers(config, expected):
    if isinstance(expected, tuple):
        assert names.end_tokens(config, 61) == expected
    else:
        with refused(CheckpointError, expected):
            names.end_tokens(config, 61)


TIMM = dict(width=16, depth=1, num_heads=2, mlp_dim=32, patch_size=(8, 8), mlp="gelu", pool_type="tok")


@pytest.mark.parametrize("resized", [44, 53])
def test_crop_of_an_image_is_read_and_written_for_timm(resized):
    """The fraction is rounded: 40 / (40 / 53) is less than 53."""
    for mode, op in (("squash", f"resize([{resized}, {resized}]"), ("center", f"resize_small({resized}")):
        pp = f'decode|{op}, "bicubic", True)|central_crop(40)|value_range(-1, 1)'
        found = timm_vit.config(Description("vit", 4, TIMM, pp))["pretrained_cfg"]
        assert (found["crop_mode"], found["crop_pct"]) == (mode, pytest.approx(40 / resized))
        assert timm_vit._pp(found) == pp
