"""Choosing tokens, the loop that generates them, and the command around it."""

import itertools
import json
import re

import corpora
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decode import DC, LLAMA, MODELS, VOCAB, make

from dcvit import cli
from dcvit import generate as command
from dcvit.errors import ConfigError
from dcvit.inference import generation
from dcvit.inference.generation import Sampling, TextStream, complete, generate, sample
from dcvit.models import lm
from dcvit.training import setup
from input_pipeline.text.tokenizer import open_tokenizer

GREEDY = Sampling(temperature=0)
PROMPTS = [[3], [1, 2, 5], [4, 4, 1, 2, 6, 3, 5, 1, 0], [2, 6, 1, 3, 3, 1]]


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """What tokens should be drawn from, one logit after the other."""
    logits = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = {i: np.exp(logits[i] - logits.max()) for i in order}
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += weights[i] / sum(weights.values())
        if reached >= top_p:
            break
    probabilities = np.zeros(len(logits))
    probabilities[kept] = [weights[i] / sum(weights[j] for j in kept) for i in kept]
    return probabilities


def draws(logits, sampling, count=4000):
    keys = jax.random.split(jax.random.key(0), count)
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (count, len(logits)))
    return np.asarray(jax.jit(sample, static_argnums=2)(many, keys, sampling))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"top_k": 4, "top_p": 0.8, "temperature": 1.5},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution_that_a_loop_finds(options):
    logits = np.random.default_rng(3).normal(size=9) * 1.2
    expected = distribution(logits, **options)
    found = np.bincount(draws(logits, Sampling(**options)), minlength=9)
    kept = expected > 0
    assert not found[~kept].any()
    expected = 4000 * expected[kept]
    assert ((found[kept] - expected) ** 2 / expected).sum() < 35  # chi-square, 8 degrees of freedom: 1 in 40,000
    assert set(np.flatnonzero(found)) >= set(np.flatnonzero(kept)[expected > 20])


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.999])
def test_the_tokens_that_a_nucleus_needs_are_sorted_and_no_token_changes(monkeypatch, top_p):
    logits = jax.random.normal(jax.random.key(1), (200, 40)) * 2
    keys = jax.random.split(jax.random.key(2), 200)
    compiled = lambda: jax.jit(lambda *a: sample(*a, Sampling(top_p=top_p)))  # noqa: E731
    one = compiled()(logits, keys)
    monkeypatch.setattr(generation, "SHORTLIST", 12)
    shortlisted = compiled()
    np.testing.assert_array_equal(one, shortlisted(logits, keys))
    few = [shortlisted(logits[i : i + 1], keys[i : i + 1]) for i in range(20)]
    np.testing.assert_array_equal(one[:20], np.concatenate(few))


def test_few_or_equal_or_extreme_logits():
    assert set(draws([0.0, 2.0, 2.0, 2.0], Sampling(top_k=2))) == {1, 2}
    assert set(draws([0.0, 2.0, 2.0, 2.0], Sampling(top_p=0.5))) == {1, 2}
    assert set(draws([1.0, 3.0, 2.0], Sampling(top_p=1e-9))) == {1}
    assert set(draws([1.0, 3.0, 2.0], Sampling(temperature=1e-300))) == {1}
    assert set(draws([1.0, 3.0, 3.0], GREEDY)) == {1}
    assert set(draws([1.0, 3.0, -3.0], Sampling(temperature=1e300))) == {0, 1, 2}
    assert set(draws([1.0, 3e38, -3e38], Sampling(top_p=0.9))) == {1}
    assert set(draws([5.0], Sampling(top_k=1))) == {0}


@pytest.mark.parametrize("name", ["DCFormer", "DCFormer++", "documents, learned, scanned"])
def test_greedy_tokens_are_the_likeliest_of_the_whole_sequence(name):
    net, params = make(MODELS[name])
    apply = jax.jit(lambda tokens: net.apply({"params": params}, tokens)[0])
    for prompt, found in zip(PROMPTS, complete(net, params, PROMPTS, max_tokens=9, sampling=GREEDY), strict=True):
        assert len(found) == 9
        row = np.zeros((1, net.context), np.int32)
        row[0, : len(prompt) + 9] = prompt + found
        expected = np.asarray(apply(row))[0, len(prompt) - 1 : len(prompt) + 8].argmax(axis=-1)
        assert found == expected.tolist()


def test_an_examples_tokens_depend_on_its_number_and_the_seed_only():
    net, params = make(MODELS["DCFormer++"])
    options = {"max_tokens": 9, "sampling": Sampling(1.5, top_p=0.9)}
    prompts = [prompt[:7] for prompt in PROMPTS]
    batch = complete(net, params, prompts, **options, seed=1)
    assert batch == complete(net, params, prompts, **options, seed=1)
    assert batch != complete(net, params, prompts, **options, seed=2)
    assert batch[::-1] == complete(net, params, prompts[::-1], **options, seed=1, examples=[3, 2, 1, 0])
    for i, prompt in enumerate(prompts):
        assert complete(net, params, [prompt], **options, seed=1, examples=[i]) == [batch[i]]
    same = complete(net, params, [prompts[1]] * 4, **options)
    assert len(set(map(tuple, same))) == 4
    longer = complete(net, params, [prompts[1]], **options | {"max_tokens": 12})
    assert longer[0][:9] == same[0]


def test_one_step_is_compiled_for_a_whole_generation_and_again_for_none_like_it():
    net, params = make(MODELS["DCFormer++"], context=64)
    before = generation._step._cache_size(), generation._prefill._cache_size()
    complete(net, params, PROMPTS, max_tokens=20)
    complete(net, params, [prompt[:5] for prompt in PROMPTS], max_tokens=22, seed=5)
    assert (generation._step._cache_size(), generation._prefill._cache_size()) == (before[0] + 1, before[1] + 1)


def test_lengths_are_rounded_up_by_little_and_to_few():
    lengths = [generation._rounded(n) for n in range(1, 2049)]
    assert all(n <= rounded <= max(16, n + 15, n * 1.25) for n, rounded in enumerate(lengths, start=1))
    assert len(set(lengths)) == 8 + 4 * 4


def test_parameters_in_the_dtype_of_the_computation_change_no_bit():
    net, params = make(DC | LLAMA | {"static": True, "qk_norm": "rmsnorm"}, dtype_mm="bfloat16")
    tokens = np.array([PROMPTS[2]], np.int32)
    apply = jax.jit(lambda params: net.apply({"params": params}, jnp.asarray(tokens))[0])
    narrowed = generation.narrowed(net, params)
    assert {x.dtype for x in jax.tree.leaves(narrowed)} == {np.dtype(jnp.bfloat16), np.dtype(np.float32)}
    np.testing.assert_array_equal(apply(params), apply(narrowed))


def chain(*follow, size=257, context=512):
    """A model without layers in which each token of a chain is followed by the next one, and its parameters."""
    net = lm.Model(size, context=context, width=size, depth=0, num_heads=1, rotary_fraction=0.01)
    kernel = np.zeros((size, size), np.float32)
    for one in follow:
        for a, b in itertools.pairwise(one):
            kernel[a, b] = 10
    params = {"embedding": {"embedding": np.eye(size, dtype=np.float32)}, "head": {"kernel": kernel}}
    return net, params | {"Transformer": {"decoder_norm": {"scale": np.ones(size, np.float32)}}}


def test_an_example_ends_before_a_stop_token_and_the_others_go_on():
    net, params = chain([1, 2, 3, 4, 5, 6, 7, 8, 9], size=10)
    options = {"max_tokens": 6, "sampling": GREEDY, "stop": [5, 9]}
    assert complete(net, params, [[1], [6], [4], [2]], **options) == [[2, 3, 4], [7, 8], [], [3, 4]]
    steps = list(generate(net, params, [[1], [6], [4], [2]], **options))
    assert steps == [[2, 7, None, 3], [3, 8, None, 4], [4, None, None, None]]
    assert list(generate(net, params, [[4]], **options)) == []
    assert complete(net, params, [], **options) == []
    assert complete(net, params, [[], [1, 1]], **options, begin=6) == [[7, 8], [2, 3, 4]]
    assert complete(net, params, [[1]], **options, vocab_size=3)[0][0] == 2
    assert 3 not in complete(net, params, [[1]], **options, vocab_size=3)[0]


def test_a_generation_may_be_left_early_and_begun_again():
    net, params = chain([1, 2, 3, 4], size=10)
    for _ in range(2):
        steps = generate(net, params, [[1]], max_tokens=6, sampling=GREEDY)
        assert next(steps) == [2]
        steps.close()


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "an empty prompt, and no end-of-text token"),
        ([[1, 7]], {}, "token 7 of a prompt is none of the model's 7"),
        ([[-1]], {}, "token -1 "),
        ([[1]], {"begin": 9, "max_tokens": 0}, "max_tokens=0"),
        ([[]], {"begin": 9}, "token 9 "),
        ([[1] * 19], {}, "a prompt of 19 tokens fills the model's context of 18"),
        ([[1], [1] * 14], {}, "14 tokens of a prompt and 5 new ones"),
        ([[1]], {"sampling": Sampling(temperature=-1)}, "temperature=-1 "),
        ([[1]], {"sampling": Sampling(temperature=float("nan"))}, "temperature=nan "),
        ([[1]], {"sampling": Sampling(temperature=float("inf"))}, "temperature=inf "),
        ([[1]], {"sampling": Sampling(top_k=-1)}, "top_k=-1 "),
        ([[1]], {"sampling": Sampling(top_p=0.0)}, "top_p=0.0 "),
        ([[1]], {"sampling": Sampling(top_p=1.1)}, "top_p=1.1 "),
        ([[1]], {"seed": -1}, "seed=-1 "),
        ([[1]], {"vocab_size": VOCAB + 1}, "vocab_size=8 should be in 1 … 7"),
        ([[1]], {"examples": [1, 2]}, "2 numbers of examples for 1 prompts"),
    ],
)
def test_what_does_not_fit_is_said_at_once(prompts, options, message):
    net = lm.Model(VOCAB, context=18)
    with pytest.raises(ConfigError, match=message) as error:
        generate(net, {}, prompts, **{"max_tokens": 5, **options})
    assert "\n" not in str(error.value)


def test_logits_that_are_not_finite_stop_the_generation():
    net, params = chain([1, 2], size=10)
    params["head"]["kernel"][3, 4] = np.nan
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        complete(net, params, [[1], [3]], max_tokens=3)


class Bytes:
    """A tokenizer of bytes, and an end of a text."""

    end_of_text, vocab_size = 256, 257

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


TEXT = "def é(x):\n    return '世界 🎉' # … done"


def pieces(text, stop=(), after=b""):
    stream = TextStream(Bytes().decode, stop, after=list(after))
    data = text if isinstance(text, bytes) else text.encode()
    return [*(stream.push(b) for b in data), stream.rest()], stream


@pytest.mark.parametrize("text", [TEXT, TEXT * 8, "🎉" * 100, "", "a" * 200])
@pytest.mark.parametrize("after", ["", "before é", "🎉" * 40])
def test_a_stream_shows_whole_characters_as_soon_as_they_are_whole(text, after):
    found, stream = pieces(text, after=after.encode())
    assert "".join(found) == text
    assert found[-1] == ""
    ends = np.cumsum([len(c.encode()) for c in text])
    assert [i for i, piece in enumerate(found) if piece] == [end - 1 for end in ends]
    assert not stream.stopped


@pytest.mark.parametrize("spelling", ["bytes", "nested", "text"])
@pytest.mark.parametrize("before", ["", "the ", "日本語日本語日本語", "the 🎉"])
def test_a_stream_shows_the_text_of_every_kind_of_tokenizer(tmp_path, spelling, before):
    """Some decode the bytes of a character that is not whole yet, and of all before it, to a mark each."""
    opened = open_tokenizer(str(corpora.train_tokenizer(tmp_path / "tokenizer.json", spelling)))
    for text in ("héllo 😀 日本 ok", "日本語" * 20, "the one 🎉🎉", TEXT):
        stream = TextStream(opened.decode, after=opened.encode(before))
        assert "".join([*map(stream.push, opened.encode(text)), stream.rest()]) == text


def test_bytes_that_are_no_text_are_shown_once_and_none_waits_for_ever():
    assert "".join(pieces(b"a\xff\xfe\xc3b\xf0\x9f\x8e")[0]) == "a\ufffd\ufffd\ufffdb"
    assert "".join(pieces(b"\xff" * 100 + b"!")[0]) == "\ufffd" * 100 + "!"
    assert "".join(pieces(b"a" + b"\xff" * 100)[0]) == "a"  # nothing that may still become a character


@pytest.mark.parametrize("stop", [["\n"], ["return"], ["界"], ["xyz", "done", "# …"], ["' #", "'!"], [TEXT]])
@pytest.mark.parametrize("before", ["", "abc " * 40])
def test_a_stream_ends_before_the_first_stop_string(stop, before):
    text = before + TEXT
    expected = text[: min(at for at in map(text.find, stop) if at >= 0)]
    found, stream = pieces(text, stop)
    assert stream.stopped
    assert "".join(found) == expected


def test_a_stop_string_that_does_not_come_holds_nothing_back_in_the_end():
    found, stream = pieces("aab aab aa", ["aabc", "aaa"])
    assert "".join(found) == "aab aab aa"
    assert (found[0], found[2], found[3], found[-1]) == ("", "", "aab ", "aa")
    assert not stream.stopped
    assert "".join(pieces("bc", ["abc"], after=b"a")[0]) == "bc"  # what came before is no part of the text
    with pytest.raises(ConfigError, match="empty stop string"):
        TextStream(Bytes().decode, [""])


SENTENCE = "xé世🎉 go"  # no two bytes are the same, so that a chain can say it


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs the command with a model that says SENTENCE and ends; returns status, stdout and stderr."""
    made = chain([*SENTENCE.encode(), 256], [256, *b"AB", 256])
    monkeypatch.setattr(command, "run_config", lambda args, overrides: (None, None))
    monkeypatch.setattr(setup, "language_model", lambda config, checkpoint: made)
    monkeypatch.setattr(setup, "tokenizer", lambda config, given: Bytes())

    def run(*words):
        status = cli.run(command.main, list(words))
        return status, *capsys.readouterr()

    return run


def test_the_command_shows_prompt_and_text_while_it_comes(say, monkeypatch):
    shown = []
    write = command.write
    monkeypatch.setattr(command, "write", lambda text: (shown.append(text), write(text)))
    status, out, err = say("--prompt", "x", "--temperature", "0")
    assert (status, out) == (0, SENTENCE + "\n")
    assert [piece for piece in shown if piece] == ["xé"[:1], *SENTENCE[1:], "\n"]
    assert err.count("\n") == 1
    assert err.startswith("12 tokens, ")
    assert err.endswith(" tokens/s, context 13 of 512\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters(monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    command.write("a\x1b[2J\n\té\x9b\x07")
    assert capsys.readouterr().out == ("a\ufffd[2J\n\té\ufffd\ufffd" if terminal else "a\x1b[2J\n\té\x9b\x07")


def test_several_prompts_files_and_json(say, tmp_path):
    (tmp_path / "a.txt").write_text("世")
    words = ["--prompt", "x", "--prompt", "", "--prompt_file", str(tmp_path / "a.txt"), "--temperature", "0"]
    status, out, err = say(*words, "--tokens", "9", "--stop", " g", "--stop", "é🎉")
    assert (status, out) == (0, "== 1 ==\nxé世🎉\n== 2 ==\nAB\n== 3 ==\n世🎉\n")
    status, out, err = say(*words, "--tokens", "9", "--format", "json", "--stop", "世")
    assert status == 0
    rows = json.loads(out)
    assert [(row["text"], row["tokens"], row["ended"]) for row in rows] == [
        ("é", 5, "stop"), ("AB", 2, "end_of_text"), ("🎉 go", 7, "end_of_text"),
    ]  # fmt: skip
    assert rows[2]["prompt"] == "世"
    assert err.startswith("14 tokens")
    status, out, _ = say("--prompt", "x", "--temperature", "0", "--tokens", "4", "--format", "json")
    assert json.loads(out) == [{"prompt": "x", "text": "é", "tokens": 4, "ended": "length"}]


def test_drawn_text_is_the_seeds(say):
    words = ["--prompt", "x", "--prompt", "xx", "--temperature", "30", "--tokens", "8", "--format", "json"]
    assert say(*words)[1] == say(*words, "--seed", "0")[1] != say(*words, "--seed", "1")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --prompt TEXT or --prompt_file FILE"),
        (["--prompt", "x", "--top_p", "2"], "top_p=2.0 should"),
        (["--prompt", "x", "--temperature", "warm"], "invalid float value: 'warm'"),
        (["--prompt", "x", "--tokens", "0"], "--tokens 0: should be 1 or more"),
        (["--prompt", "x", "--tokens", "512"], "1 tokens of a prompt and 512 new ones are more than"),
        (["--prompt", "x" * 600], "a prompt of 600 tokens fills"),
        (["--prompt", "\udcff"], "is not valid UTF-8"),
        (["--prompt", "x", "--stop", ""], "--stop: an empty text"),
        (["--prompt", "x", "--seed", "-1"], "seed=-1"),
        (["--prompt", "x", "--format", "table"], "invalid choice: 'table'"),
        (["--prompt_file", "missing.txt"], "missing.txt"),
        (["--prompt_file", "latin.txt"], "latin.txt is not UTF-8: .* at byte 1"),
        (["--prmpt", "x"], "unknown option --prmpt; .*--prompt"),
    ],
)
def test_bad_input_is_one_line_and_status_2(say, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"a\xe9 b")
    status, out, err = say(*words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(message, err), err


def test_ctrl_c_ends_the_line_and_the_command(say, monkeypatch):
    push = TextStream.push

    def interrupted(self, token):
        if token == ord("g"):
            raise KeyboardInterrupt
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", interrupted)
    status, out, err = say("--prompt", "x", "--temperature", "0")
    assert (status, out, err) == (130, "xé世🎉 \n", "interrupted\n")
