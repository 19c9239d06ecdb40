"""Files of weights: which file of a folder is read, where its description is, and which indexes are refused."""

import json

import numpy as np
import pytest

from dcvit.errors import CheckpointError
from dcvit.interop import own
from dcvit.interop.family import Description
from dcvit.interop.safetensors_writer import write_shards
from dcvit.interop.tensors import open_file
from dcvit.interop.weights import open_weights

ARRAYS = {"head/kernel": np.ones((8, 4), np.float32), "norm/scale": np.ones(8, np.float32)}
DESCRIPTION = Description("vit", 4, dict(width=8, depth=1, num_heads=2, pool_type="tok"), "decode")


@pytest.mark.parametrize("max_shard_bytes", [1000, 64])
def test_the_header_describes_a_folder_without_config(tmp_path, max_shard_bytes):
    """Without the description, names such as those of big_vision are another model."""
    write_shards(tmp_path, iter(ARRAYS.items()), max_shard_bytes=max_shard_bytes, metadata=own.metadata(DESCRIPTION))
    weights = open_weights(tmp_path)
    assert (weights.family, weights.description) == ("own", DESCRIPTION)


def test_the_index_of_another_format_is_ignored(tmp_path):
    write_shards(tmp_path, iter(ARRAYS.items()))
    index = {"weight_map": {"head/kernel": "flax_model-00001-of-00001.msgpack"}}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    assert open_file(tmp_path).tensors.keys() == ARRAYS.keys()


@pytest.mark.parametrize(
    ("files", "message"), [({}, "expected weight_map"), ({"a": ""}, "names '', which"), ({"a": ".."}, "no file")]
)
def test_an_index_without_names_of_files_is_refused(tmp_path, files, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match=message):
        open_file(tmp_path)
