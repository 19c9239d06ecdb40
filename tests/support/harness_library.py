"""The library lm_eval in tests: its settings, and small models behind it."""

import functools
import os
import tempfile
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit import lm_eval
from dcvit.inference.texts import LanguageModel
from dcvit.models import lm
from input_pipeline.text.tokenizer import ByteTokenizer

os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="dcvit-tests-"))  # read when its libraries are imported

CONTEXT = 40
END = 256
TINY = {"context": CONTEXT, "width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "init_std": 0.4}
MODELS = {
    "DCFormer++": {"compose": "both", "window_pattern": "1:1", "window": 8},
    "Transformer": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "use_bias": True, "tied": True},
    "documents": {"compose": "pre", "end_of_text": END, "scan": True},
}


@pytest.fixture(scope="module")
def harness_library():
    """Settings of the library."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*lm_eval.OFFLINE, "DISABLE_MULTIPROC"):  # the command sets them for its own process
            patch.setenv(name, "1")
        patch.setattr("dcvit.models.losses.POSITIONS", 16)  # smaller than a row, and no divisor of its length
        yield


@functools.cache
def made(name):
    """A language model with random parameters, its logits of one row, and the harness's models by batch size."""
    from dcvit.inference.harness import HarnessModel

    net = lm.Model(257, **TINY, **MODELS[name])
    params = jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    apply = jax.jit(lambda tokens: net.apply({"params": params}, tokens)[0])

    def logits(tokens):  # padded to one length, so that one program is compiled
        return apply(jnp.asarray([[*tokens, *[END] * (CONTEXT - len(tokens))]]))[0, : len(tokens)]

    loaded = LanguageModel(net, params, {}, open_tokenizer=lambda path: ByteTokenizer())
    sized = {size: HarnessModel(loaded, batch_size=size) for size in (1, 16)}
    return SimpleNamespace(loaded=loaded, logits=logits, sized=sized)


def direct(model, tokens, scored):
    """The sum of log p of the last `scored` tokens, and whether all are greedy choices, from one forward pass."""
    log_p = np.asarray(jax.nn.log_softmax(model.logits(tokens[:-1])), np.float64)[-scored:]
    targets = tokens[-scored:]
    return log_p[np.arange(scored), targets].sum(), bool((log_p.argmax(axis=1) == targets).all())
