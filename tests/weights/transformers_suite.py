"""transformers' own tests of a model (`ModelTesterMixin`), for the classes of `modeling_dcvit.py`.

`test_transformers_suite` runs this file among transformers' tests, which the source distribution of transformers holds.
"""

import unittest

import torchvision_ops  # noqa: F401
import transformers
from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor, random_attention_mask
from transformers.models.auto import modeling_auto as auto

from dcvit.weights import modeling_dcvit as modeling

# The tests know by these tables which classes have labels.
for table, kind, name in (
    (auto.MODEL_MAPPING_NAMES, "dcformer", "DCFormerModel"),
    (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "dcformer", "DCFormerForCausalLM"),
    (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "dcformer", "DCFormerForSequenceClassification"),
    (auto.MODEL_MAPPING_NAMES, "dcvit", "DCViTModel"),
    (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "dcvit", "DCViTForImageClassification"),
):
    table[kind] = name
transformers.AutoConfig.register("dcformer", modeling.DCFormerConfig)
transformers.AutoModel.register(modeling.DCFormerConfig, modeling.DCFormerModel)
transformers.AutoModelForSequenceClassification.register(
    modeling.DCFormerConfig, modeling.DCFormerForSequenceClassification
)
SIZES = {"width": 32, "depth": 2, "num_heads": 4}


class Inputs:
    """Sizes of the small model and of its inputs, under the names that transformers' tests use."""

    batch_size, seq_length, num_hidden_layers, num_attention_heads, hidden_size, is_training = 3, 7, 2, 4, 32, True

    def __init__(self, parent):
        self.parent = parent


class TextInputs(Inputs):
    def get_config(self):
        return modeling.DCFormerConfig(**SIZES, vocab_size=99, context=64, num_labels=3, pad_token_id=0)

    def prepare_config_and_inputs_for_common(self):
        tokens = ids_tensor([self.batch_size, self.seq_length], 99).clamp(min=1)
        return self.get_config(), {"input_ids": tokens, "attention_mask": random_attention_mask(tokens.shape)}


class ImageInputs(Inputs):
    seq_length = 6

    def get_config(self):
        return modeling.DCViTConfig(**SIZES, image_size=[8, 12], patch_size=[4, 4], num_labels=3)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": floats_tensor([self.batch_size, 3, 8, 12])}


class TextTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        modeling.DCFormerModel,
        modeling.DCFormerForCausalLM,
        modeling.DCFormerForSequenceClassification,
    )

    def setUp(self):
        self.model_tester = TextInputs(self)

    @unittest.skip("the source distribution does not hold the tests of generation; test_modeling_dcvit has own ones")
    def test_generation_tester_mixin_inheritance(self): ...

    @unittest.skip("the model with a head holds the layers itself, so that tensors have one name in every class")
    def test_model_base_model_prefix(self): ...

    @unittest.skip("shift_labels, which context parallelism passes, raises TypeError")
    def test_causal_lm_loss_honors_shift_labels(self): ...


class ImageTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (modeling.DCViTModel, modeling.DCViTForImageClassification)
    test_resize_embeddings = False  # of words

    def setUp(self):
        self.model_tester = ImageInputs(self)

    @unittest.skip("a convolution embeds the patches")
    def test_model_get_set_embeddings(self): ...

    @unittest.skip("problem_type='regression' raises ValueError")
    def test_problem_types(self): ...
