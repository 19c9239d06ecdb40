"""The decode loop: tokens of the full forward pass, reproducible randomness, ends, and few compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import DC, GPT3, LLAMA, VOCAB, chain_model, complete, random_model

from dcvit.errors import CheckpointError, ConfigError
from dcvit.inference import generation
from dcvit.inference.generation import Options, generate
from dcvit.inference.sampling import Sampling
from dcvit.models import lm

GREEDY = Sampling(temperature=0)
PROMPTS = [[3], [1, 2, 5], [4, 4, 1, 2, 6, 3, 5, 1, 0], [2, 6, 1, 3, 3, 1]]
MODELS = [
    pytest.param(LLAMA | DC | {"qk_norm": "rmsnorm"}, id="DCFormer++", marks=pytest.mark.slow),
    pytest.param(GPT3 | DC | {"end_of_text": 0, "scan": True}, id="documents", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("fields", MODELS)
def test_greedy_tokens_are_those_of_the_full_forward_pass(fields):
    model, params = random_model(**fields)
    apply = jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])
    completions = complete(model, params, PROMPTS, Options(9, GREEDY))
    rows = np.zeros((len(PROMPTS), model.context), np.int32)
    for row, prompt, found in zip(rows, PROMPTS, completions, strict=True):
        assert len(found) == 9
        row[: len(prompt) + 9] = prompt + found
    logits = np.asarray(apply(rows))
    for row, prompt, found in zip(logits, PROMPTS, completions, strict=True):
        assert found == row[len(prompt) - 1 : len(prompt) + 8].argmax(axis=-1).tolist()


@pytest.mark.slow
def test_sampled_tokens_depend_only_on_the_seed_and_the_number_of_the_example():
    model, params = random_model(**LLAMA, depth=1)
    options = Options(9, Sampling(1.5, top_p=0.9))
    seeded = options._replace(seed=1)
    prompts = [prompt[:7] for prompt in PROMPTS]
    batch = complete(model, params, prompts, seeded)
    assert batch == complete(model, params, prompts, seeded)
    assert batch != complete(model, params, prompts, options._replace(seed=2))
    assert batch[::-1] == complete(model, params, prompts[::-1], seeded, examples=[3, 2, 1, 0])
    for i, prompt in enumerate(prompts):
        assert complete(model, params, [prompt], seeded, examples=[i]) == [batch[i]]
    same = complete(model, params, [prompts[1]] * 4, options)
    assert len(set(map(tuple, same))) == 4
    longer = complete(model, params, [prompts[1]], options._replace(max_tokens=10))
    assert longer[0][:9] == same[0]


@pytest.mark.slow
def test_batches_of_nine_and_ten_share_programs():
    model, params = random_model(**LLAMA, depth=1, context=64)
    prompts = [[i % 7, i // 7, 3] for i in range(10)]
    ten = complete(model, params, prompts, Options(5))
    before = generation._step._cache_size(), generation._prefill._cache_size()
    nine = complete(model, params, prompts[:9], Options(5))
    assert (generation._step._cache_size(), generation._prefill._cache_size()) == before
    assert nine == ten[:9]


@pytest.mark.exhaustive
def test_cast_parameters_give_bitwise_equal_logits():
    model, params = random_model(**LLAMA, compose="both", depth=1, static=True, qk_norm="rmsnorm", dtype_mm="bfloat16")
    tokens = jnp.array([PROMPTS[2]], jnp.int32)
    apply = jax.jit(lambda params: model.apply({"params": params}, tokens)[0])
    converted = generation.cast_params(model, params)
    assert {x.dtype for x in jax.tree.leaves(converted)} == {np.dtype(jnp.bfloat16), np.dtype(np.float32)}
    np.testing.assert_array_equal(apply(params), apply(converted))


@pytest.mark.slow
def test_an_example_ends_before_a_stop_token_and_the_others_continue():
    """An empty prompt begins with the given token, and only tokens of the vocabulary are generated."""
    model, params = chain_model([1, 2, 3, 4, 5, 6, 7, 8, 9], size=10)
    options = Options(6, GREEDY, stop=[5, 9])
    steps = list(generate(model, params, [[1], [6], [4], [2]], options))
    assert steps == [[2, 7, None, 3], [3, 8, None, 4], [4, None, None, None]]
    assert complete(model, params, [[1], [6], [4], [2]], options) == [[2, 3, 4], [7, 8], [], [3, 4]]
    assert list(generate(model, params, [[4]], options)) == []
    assert complete(model, params, [], options) == []
    assert complete(model, params, [[], [1, 1]], options._replace(begin=6)) == [[7, 8], [2, 3, 4]]
    (found,) = complete(model, params, [[1]], options._replace(vocab_size=3))
    assert found[0] == 2
    assert 3 not in found


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 7]], "the prompt's token 7 should be in 0 … 6"),
        ([[1], [1] * 14], "a prompt of 14 tokens and 5 new ones exceed"),
    ],
)
def test_invalid_prompts_are_errors_before_the_first_step(prompts, message):
    with pytest.raises(ConfigError, match=message):
        generate(lm.Model(VOCAB, context=18), {}, prompts, Options(5))


@pytest.mark.slow
def test_logits_that_are_not_finite_are_an_error():
    model, params = chain_model([1, 2], size=10)
    params["head"]["kernel"][3, 4] = np.nan
    with pytest.raises(CheckpointError, match="logits are not finite"):
        complete(model, params, [[1], [3]], Options(3))
