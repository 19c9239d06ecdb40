"""A data source of given examples, and a model and a mesh with which tests evaluate it."""

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.evaluators import EvaluationData
from dcvit.parallel.sharding import make_mesh
from input_pipeline import CorruptPolicy, InputError, Source


class ListSource(Source):
    """Examples in a list, of which some cannot be read: they raise `error`."""

    def __init__(self, examples, corrupt=(), class_names=None, error=None):
        self.examples, self.corrupt, self.class_names = list(examples), corrupt, class_names
        self.error = error or InputError("bad bytes")

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        if index in self.corrupt:
            raise self.error
        return self.examples[index]

    def describe(self, index):
        return f"example {index}"

    def nbytes(self):
        return len(self)


def numbered(labels, side=1):
    """Return examples whose image is their number, with the given labels."""
    return [{"image": np.full((side, side, 1), i, np.uint8), "label": label} for i, label in enumerate(labels)]


def look_up(params, images):
    """Return the logits of `numbered` examples from a table, as a model."""
    return params["table"][images[:, 0, 0, 0].astype(jnp.int32)], {}


def mesh_of(devices):
    """Return a mesh of a number of devices, which split a batch."""
    return make_mesh([("data", -1)], jax.devices()[:devices])


def evaluation_data(source, mesh=None, corrupt="fail", shape=(1, 1, 1, 1)):
    """Return a source as the data of an evaluator, by default on one device."""
    example = jax.ShapeDtypeStruct(shape, np.float32)
    return EvaluationData(source, mesh or mesh_of(1), example, CorruptPolicy(corrupt))
