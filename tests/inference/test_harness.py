"""The requests of lm-evaluation-harness, answered as forward passes of the model and as the harness's `HFLM` do."""

import importlib.util
import string

import numpy as np
import pytest

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip('lm_eval is not installed: pip install "dcvit[eval]"', allow_module_level=True)

import corpora
from foreign_models import libraries, with_random_weights
from harness_library import CONTEXT, END, MODELS, TINY, direct, harness_library, made  # noqa: F401

import dcvit
from dcvit.errors import ConfigError
from dcvit.inference.generation import Options
from dcvit.inference.sampling import Sampling
from dcvit.inference.texts import LanguageModel
from dcvit.models import lm
from input_pipeline.text.tokenizer import ByteTokenizer, FileTokenizer

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
        expected.append(ByteTokenizer().decode(tokens[: tokens.index(END)] if END in tokens else tokens))
    options = {"until": [], "max_gen_toks": 12, "do_sample": False}
    found = one.sized[1].generate_until(requests(*((prompt, options) for prompt in prompts)))
    assert found == expected
    stop = next(text[len(text) // 2] for text in expected if len(text) > 2)
    options = {"until": stop, "max_gen_toks": 12, "temperature": 0.0}
    found = one.sized[1].generate_until(requests(*((prompt, options) for prompt in prompts)))
    assert found == [text.split(stop)[0] for text in expected]


SIZES = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": CONTEXT}
TOKENIZERS = {"llama": "LlamaTokenizer", "gpt2": "GPT2Tokenizer", "gpt_neox": "GPTNeoXTokenizer"}


def tokenizer_of(kind):
    """A small tokenizer of transformers: LLaMA's, with `<s>` before each text, or one of bytes as in GPT-2."""
    _, transformers = libraries()
    if kind == "llama":
        space, special, options = "\u2581", ["<unk>", "<s>", "</s>"], {"add_bos_token": True}
        letters = [*(f"<0x{i:02X}>" for i in range(256)), space, *string.ascii_lowercase]
    else:
        space, special, options = "\u0120", ["<|endoftext|>"], {}
        letters = sorted(pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("f", "o"), ("fo", "x"), (space, "fox")]
    tokens = [*special, "<|eot|>", *letters, *("".join(pair) for pair in merges)]
    return getattr(transformers, TOKENIZERS[kind])(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, extra_special_tokens=["<|eot|>"], **options
    )


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_weights_of_transformers_are_evaluated_as_by_the_harness(kind, tmp_path):
    """Tokens at the beginning and the end of texts, in texts, beyond the context, and incomplete characters."""
    import torchvision_ops  # noqa: F401
    from lm_eval.models.huggingface import HFLM

    from dcvit.inference.harness import HarnessModel

    torch, transformers = libraries()
    tokenizer = tokenizer_of(kind)
    begin, ends = tokenizer.bos_token, [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot|>")]
    config = transformers.AutoConfig.for_model(kind, **SIZES, vocab_size=len(tokenizer), eos_token_id=ends)
    model = with_random_weights(transformers.AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        model.get_output_embeddings().weight[ends[1]] *= 3  # generated often
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    # The library's cache scores a short continuation at the place of a longer one with the same tokens before it.
    theirs = HFLM(str(tmp_path), device="cpu", batch_size=1, logits_cache=False)
    loaded = dcvit.load(tmp_path)
    ours = HarnessModel(loaded)

    pairs = requests(
        ("", "the fox"), ("", f"{begin}the"), ("a", " b"), ("the ", "fox"), ("the fox  ", " é"), ("漢", "字"),
        ("the lazy dog " * 20, "jumps"), (f"{begin}the", " fox"), ("dog<|eot|>", " é"), ("é", "x" * 30),
    )  # fmt: skip
    for (log_p, is_greedy), expected in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert (pytest.approx(log_p, abs=1e-4), is_greedy) == expected
    texts = requests(("",), ("a",), ("the quick brown 漢字 fox " * 20,), (f"{begin}the dog",))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-4)
    prompts = ["the", "a ", "quick brown fox " * 20, f"{begin}dog", "naïve 漢", "jumps", "over"]
    prompts += [""] if kind == "llama" else []  # `HFLM` fails without a token
    for until in ([], ["\n", "e", " b"], "ox"):
        asked = requests(*((prompt, {"until": until, "max_gen_toks": 12}) for prompt in prompts))
        assert ours.generate_until(asked) == theirs.generate_until(asked)


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
    with_end, without = (
        LanguageModel(lm.Model(257, **TINY, **fields), {}, {}, open_tokenizer=lambda path: tokenizer)
        for fields in ({"end_of_text": 3}, {})
    )
    assert HarnessModel(with_end).eot_token_id == 3
    with pytest.raises(ConfigError, match="no end-of-text token"):
        HarnessModel(without)


def test_the_tokenizer_of_a_run_is_not_taken_for_that_of_weights_if_it_has_no_end_of_text(tmp_path):
    """Then the texts would get special tokens and a template that the training data did not have."""
    from dcvit.inference.harness import HarnessModel

    corpora.train_tokenizer(tmp_path / "tokenizer.json")
    found = FileTokenizer(str(tmp_path / "tokenizer.json"), end_of_text=None)
    run = LanguageModel(lm.Model(1000, **TINY, end_of_text=3), {}, {}, open_tokenizer=lambda path: found)
    text = "<|endoftext|>"
    assert HarnessModel(run).tok_encode(text) == found.encode(text)
