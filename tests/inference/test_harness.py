"""The requests of lm-evaluation-harness, answered as forward passes of the model answer them."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip('lm_eval is not installed: pip install "dcvit[eval]"', allow_module_level=True)

from harness_library import CONTEXT, END, MODELS, TINY, direct, harness_library, made  # noqa: F401

from dcvit.errors import ConfigError
from dcvit.inference.generation import Options
from dcvit.inference.sampling import Sampling
from dcvit.models import lm
from input_pipeline.text.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("harness_library")


@pytest.fixture
def one():
    return made("DCFormer++")


def requests(*arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, args, i) for i, args in enumerate(arguments)]


def greedy(model, tokens, count):
    """The `count` greedy tokens after `tokens`, one forward pass for each."""
    found = []
    for _ in range(count):
        found.append(int(model.logits(tokens + found)[-1, :257].argmax()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "DCFormer++" else pytest.param(name, marks=pytest.mark.weekly) for name in MODELS]
)
def test_log_likelihoods_equal_forward_passes_for_every_batch_size(name):
    model = made(name)
    pairs = [
        ("", "x"), ("a", "b"), ("the cat ", "sat"), ("é", " ü"), ("q", "r" * CONTEXT),
        ("long" * 30, " answer"), ("x" * (CONTEXT - 3), "yz"), *((f"{i}" * (3 * i + 1), f" {i}") for i in range(9)),
    ]  # fmt: skip
    small, large = (model.sized[size].loglikelihood(requests(*pairs), disable_tqdm=True) for size in (1, 16))
    for (context, continuation), (log_p, is_greedy), other in zip(pairs, small, large, strict=True):
        tokens = list((context + continuation).encode()) if context else [END, *continuation.encode()]
        spaces = len(context) - len(context.rstrip())  # the harness scores them with the continuation
        expected = direct(model, tokens[-(CONTEXT + 1) :], len(continuation.encode()) + spaces)
        assert log_p == pytest.approx(expected[0], abs=1e-4)
        assert other == (pytest.approx(log_p, abs=1e-4), is_greedy)
        assert is_greedy == expected[1]
    best = greedy(model, list(b"abc"), 2)
    for continuation, is_greedy in ((best, True), ([best[0], best[1] ^ 1], False)):
        assert model.sized[1]._loglikelihood_tokens([("", list(b"abc"), continuation)])[0][1] == is_greedy
    assert model.sized[1].batch_size == 8  # the number of devices


@pytest.mark.slow
def test_rolling_log_likelihood_scores_every_token_once(one):
    texts, sums = [], []
    for length in (0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT, 133):
        tokens = list(np.random.default_rng(length).integers(97, 123, length))
        texts.append(bytes(tokens).decode())
        sums.append(0.0)
        for start in range(0, length, CONTEXT):
            end = min(length, start + CONTEXT)
            window = [END, *tokens][max(0, end - CONTEXT) : end + 1]
            sums[-1] += direct(one, window, end - start)[0]
    found = one.sized[16].loglikelihood_rolling(requests(*((text,) for text in [*texts, *texts[::-1]])))
    assert found == pytest.approx(sums + sums[::-1], abs=2e-4)


@pytest.mark.weekly
def test_greedy_generation_equals_forward_passes_until_a_stop_string(one):
    prompts, expected = ["abc", "", "some text", "y" * 60], []
    for prompt in prompts:
        tokens = greedy(one, ([*prompt.encode()] or [END])[-(CONTEXT - 12) :], 12)
        tokens = tokens[: tokens.index(END)] if END in tokens else tokens
        expected.append(ByteTokenizer().decode(tokens).removesuffix("\ufffd"))
    options = {"until": [], "max_gen_toks": 12, "do_sample": False}
    found = one.sized[1].generate_until(requests(*((prompt, options) for prompt in prompts)))
    assert found == expected
    stop = next(text[len(text) // 2] for text in expected if len(text) > 2)
    options = {"until": stop, "max_gen_toks": 12, "temperature": 0.0}
    found = one.sized[1].generate_until(requests(*((prompt, options) for prompt in prompts)))
    assert found == [text.split(stop)[0] for text in expected]


def test_generation_options_have_the_defaults_of_the_harness_or_are_refused():
    from dcvit.inference.harness import read_generation_options as read

    with pytest.raises(ConfigError, match="'num_beams': 4}, which is not supported"):
        read({"num_beams": 4}, CONTEXT)
    assert read({}, 1000) == (Options(256, Sampling(0.0)), [])
    assert read({"max_tokens": 5, "until": "a", "num_beams": 1}, 40) == (Options(5, Sampling(0.0)), ["a"])
    for options, sampling in (
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": False, "temperature": 1}, Sampling(0.0)),
        ({"temperature": 0.5, "top_k": 3}, Sampling(0.5, 3)),
    ):
        assert read(options, 40)[0].sampling == sampling


@pytest.mark.slow
def test_the_models_end_of_text_replaces_a_missing_one_of_the_tokenizer():
    from dcvit.inference.harness import HarnessModel

    tokenizer = ByteTokenizer()
    tokenizer.end_of_text = None
    assert HarnessModel(lm.Model(257, **TINY, end_of_text=3), {}, tokenizer).eot_token_id == 3
    with pytest.raises(ConfigError, match="no end-of-text token"):
        HarnessModel(lm.Model(257, **TINY), {}, tokenizer)
