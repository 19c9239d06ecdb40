"""The harness's requests against the model itself, and the command on local task files, without a network."""

import csv
import functools
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason='lm_eval is not installed: pip install "dcvit[eval]"')
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="dcvit-tests-"))  # read when its libraries are imported

from dcvit import cli
from dcvit import lm_eval as command
from dcvit.errors import ConfigError
from dcvit.models import lm
from dcvit.training import setup
from input_pipeline.text.tokenizer import ByteTokenizer

CONTEXT = 40
END = 256
TINY = {"context": CONTEXT, "width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "init_std": 0.4}
NETS = {
    "DCFormer++": {"compose": "both", "window_pattern": "1:1", "window": 8},
    "Transformer": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "use_bias": True, "tied": True},
    "documents": {"compose": "pre", "end_of_text": END, "scan": True},
}
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.bind")
watched = []


def audit(event, args):
    if watched and event in NETWORK:
        raise RuntimeError(f"network: {event} {args}")


sys.addaudithook(audit)


@pytest.fixture(scope="module", autouse=True)
def library():
    """The library's settings, and its `datasets`, in whose place the tests' own module of that name is found."""
    own, path = sys.modules.pop("datasets", None), sys.path[:]
    with pytest.MonkeyPatch.context() as patch:
        for name in (*command.OFFLINE, "DISABLE_MULTIPROC"):  # what the command sets ends with these tests
            patch.setenv(name, "1")
        sys.path[:] = [folder for folder in path if folder != str(Path(__file__).parent)]
        importlib.import_module("datasets")
        sys.path[:] = path
        patch.setattr("dcvit.inference.harness.POSITIONS", 16)  # less than a row, and no divisor of its length
        yield
    sys.modules.pop("datasets")
    if own is not None:
        sys.modules["datasets"] = own


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@functools.cache
def made(name):
    """A language model with random parameters, its logits of one row, and the harness's models for batch sizes."""
    from dcvit.inference.harness import HarnessModel

    net = lm.Model(257, **TINY, **NETS[name])
    params = jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    apply = jax.jit(lambda tokens: net.apply({"params": params}, tokens)[0])

    def logits(ids):  # compiled once: what comes after a token changes nothing
        return apply(jnp.asarray([[*ids, *[END] * (CONTEXT - len(ids))]]))[0, : len(ids)]

    sized = {size: HarnessModel(net, params, ByteTokenizer(), batch_size=size) for size in (1, 16)}
    return SimpleNamespace(net=net, params=params, logits=logits, sized=sized)


@pytest.fixture(params=NETS)
def model(request):
    return made(request.param)


@pytest.fixture
def one():
    return made("DCFormer++")


def direct(model, tokens, scored):
    """Σ log p of the last `scored` tokens and whether all are the likeliest, from one call of the model."""
    log_p = np.asarray(jax.nn.log_softmax(model.logits(tokens[:-1])), np.float64)[-scored:]
    targets = tokens[-scored:]
    return log_p[np.arange(scored), targets].sum(), bool((log_p.argmax(axis=1) == targets).all())


def greedy(model, ids, count):
    """The `count` likeliest tokens after `ids`, one call of the model for each."""
    found = []
    for _ in range(count):
        found.append(int(model.logits(ids + found)[-1, :257].argmax()))
    return found


def test_log_likelihoods_are_those_of_the_model_for_any_batch_size(model):
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
    likeliest = greedy(model, list(b"abc"), 2)
    for continuation, is_greedy in ((likeliest, True), ([likeliest[0], likeliest[1] ^ 1], False)):
        assert model.sized[1]._loglikelihood_tokens([("", list(b"abc"), continuation)])[0][1] == is_greedy
    assert model.sized[1].batch_size == 8  # as many as there are devices


def test_a_continuation_longer_than_the_context_is_refused(one):
    with pytest.raises(ConfigError, match="41 tokens is longer than the model's context of 40"):
        one.sized[1].loglikelihood(requests(("a", "b" * 41)), disable_tqdm=True)


@pytest.mark.parametrize("length", [0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT, 133])
def test_rolling_scores_every_token_once(model, length):
    ids = list(np.random.default_rng(length).integers(97, 123, length))
    text = bytes(ids).decode()
    expected = 0.0
    for start in range(0, length, CONTEXT):
        end = min(length, start + CONTEXT)
        seen = [END, *ids][max(0, end - CONTEXT) : end + 1]
        expected += direct(model, seen, end - start)[0]
    found = model.sized[16].loglikelihood_rolling(requests((text,), ("a",), (text,)))
    assert found[0] == found[2] == pytest.approx(expected, abs=1e-4)
    assert found[1] == pytest.approx(direct(model, [END, 97], 1)[0], abs=1e-4)


def test_greedy_generation_is_the_models_own_until_a_stop_string(one):
    prompts, wanted = ["abc", "", "some text", "y" * 60], []
    for prompt in prompts:
        ids = ([*prompt.encode()] or [END])[-(CONTEXT - 12) :]
        ids = greedy(one, ids, 12)
        ids = ids[: ids.index(END)] if END in ids else ids
        wanted.append(ByteTokenizer().decode(ids).removesuffix("\ufffd"))
    options = {"until": [], "max_gen_toks": 12, "do_sample": False}
    found = one.sized[1].generate_until(requests(*((prompt, options) for prompt in prompts)))
    assert found == wanted
    stop = next(text[len(text) // 2] for text in wanted if len(text) > 2)
    options = {"until": stop, "max_gen_toks": 12, "temperature": 0.0}
    found = one.sized[1].generate_until(requests(*((prompt, options) for prompt in prompts)))
    assert found == [text.split(stop)[0] for text in wanted]


def test_what_is_drawn_depends_on_the_request_only(one):
    drawn = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    asked = requests(*(("ab" * (i % 3 + 1), drawn) for i in range(16)))
    small, large = (one.sized[size].generate_until(asked) for size in (1, 16))
    assert small == large
    assert len(set(small[::3])) > 1  # equal prompts, drawn anew


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4, which is not supported"),
        ({"max_gen_toks": CONTEXT}, "40 new tokens; the model's context is 40"),
        ({"do_sample": True, "top_p": 2.0}, "top_p=2.0"),
    ],
)
def test_generation_that_cannot_be_is_refused(options, message):
    from dcvit.inference.harness import read_generation

    with pytest.raises(ConfigError, match=message):
        read_generation(options, CONTEXT)


def test_generation_options_as_the_harness_reads_them():
    from dcvit.inference.harness import read_generation

    assert read_generation({}, 1000) == ((), 256, (0.0, 0, 1.0))
    assert read_generation({"max_tokens": 5, "until": "a", "num_beams": 1}, 40) == (("a",), 5, (0.0, 0, 1.0))
    assert read_generation({"do_sample": True}, 40).sampling == (1.0, 0, 1.0)
    assert read_generation({"do_sample": False, "temperature": 1}, 40).sampling == (0.0, 0, 1.0)
    assert read_generation({"temperature": 0.5, "top_k": 3}, 40).sampling == (0.5, 3, 1.0)


def test_a_tokenizer_without_an_end_of_text_takes_the_models():
    from dcvit.inference.harness import HarnessModel

    tokenizer = ByteTokenizer()
    tokenizer.end_of_text = None
    assert HarnessModel(lm.Model(257, **TINY, end_of_text=3), {}, tokenizer).eot_token_id == 3
    with pytest.raises(ConfigError, match="no end-of-text token"):
        HarnessModel(lm.Model(257, **TINY), {}, tokenizer)


CHOICE = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [red, green]
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """
include: colours.yaml
task: words
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
doc_to_choice: null
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""
GENERATION = """
include: [colours.yaml]
task: answers
output_type: generate_until
doc_to_target: "{{answer}}"
doc_to_choice: null
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
GROUP = """
group: everything
task: [colours, words]
"""


@pytest.fixture
def folder(tmp_path):
    """Task files of the three kinds with five questions."""
    rows = [{"question": f"What colour is number {i}?", "label": i % 2, "answer": "red"} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"colours": CHOICE, "words": ROLLING, "answers": GENERATION, "everything": GROUP}
    (tmp_path / "tasks").mkdir()
    for name, text in files.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.replace("DATA", str(tmp_path / "data.jsonl")))
    return tmp_path / "tasks"


@pytest.fixture
def call(one, monkeypatch, capsys):
    """Runs the command on the model and the local tasks only; returns (exit status, stdout, stderr)."""
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **options: manager(**options, include_defaults=False))
    monkeypatch.setattr(command, "run_config", lambda args, overrides: (None, Path("somewhere")))
    monkeypatch.setattr(setup, "language_model", lambda config, checkpoint: (one.net, one.params))
    monkeypatch.setattr(setup, "tokenizer", lambda config, given: ByteTokenizer())

    def run(*argv):
        watched.append(True)
        try:
            capsys.readouterr()
            status = cli.run(command.main, [str(a) for a in argv])
        finally:
            watched.clear()
        return status, *capsys.readouterr()

    return run


def test_the_command_on_tasks_of_all_kinds(one, folder, call, tmp_path):
    words = ["--include_path", folder, "--tasks", "colours, words,answers"]
    status, out, err = call(*words, "--format", "json", "--out", tmp_path / "all.json")
    assert status == 0, err
    rows = {row["task"]: row for row in json.loads(out)}
    assert {name: row["metric"] for name, row in rows.items()} == {
        "colours": "acc", "words": "word_perplexity", "answers": "exact_match",
    }  # fmt: skip
    assert {(row["filter"], row["n"], row["num_fewshot"]) for row in rows.values()} == {("none", 5, 0)}
    questions = [f"What colour is number {i}?" for i in range(5)]
    right, nats, count = 0, 0.0, 0
    for i, question in enumerate(questions):
        choices = [[*(question + choice).encode()] for choice in (" red", " green")]
        scores = [direct(one, ids, len(ids) - len(question))[0] for ids in choices]
        right += int(np.argmax(scores)) == i % 2
        nats += direct(one, [END, *question.encode()], len(question))[0]
        count += len(question.split())
    assert rows["colours"]["value"] == right / 5
    assert rows["colours"]["stderr"] == pytest.approx(np.sqrt(right / 5 * (1 - right / 5) / 4))
    assert rows["words"]["value"] == pytest.approx(np.exp(-nats / count), rel=1e-4)
    full = json.loads((tmp_path / "all.json").read_text(), parse_constant=pytest.fail)
    assert full["results"]["words"]["word_perplexity,none"] == rows["words"]["value"]
    assert full["config"]["model"] == "somewhere"
    status, out, err = call(*words, "--format", "csv", "--limit", "2", "--num_fewshot", "1", "--batch_size", "16")
    assert status == 0, err
    assert {(row["n"], row["num_fewshot"]) for row in csv.DictReader(io.StringIO(out))} == {("2", "1")}


def test_a_group_is_its_tasks(folder, call):
    status, out, err = call("--include_path", folder, "--tasks", "everything", "--format", "json")
    assert status == 0, err
    assert [row["task"] for row in json.loads(out)] == ["colours", "words"]


CODE = [
    ("task: t\ndoc_to_text: !function evil.now\n", "the tag '!function'"),
    ("%TAG !x! !func\n---\ntask: t\nfewshot_config: {samples: [!x!tion evil.now]}\n", "the tag '!function'"),
    ("task: t\na: !!python/name:os.system ''\n", "the tag 'tag:yaml.org,2002:python/name:os.system'"),
    ("task: t\nmetric_list: [{metric: acc, hf_evaluate: true}]\n", "the key 'hf_evaluate'"),
    ("group: g\ntask: [{task: t, metric_list: [{metric: ./evil}]}]\n", "the unknown metric './evil'"),
    ("task: t\nuse_prompt: 'promptsource:all'\n", "the key 'use_prompt'"),
    ("group: g\ntask: [{task: humaneval, unsafe_code: false}]\n", "the key 'unsafe_code'"),
    ("task: t\ndataset_path: pandas\n", "data read by 'pandas'"),
    ("task: t\ndataset_path: sql\n", "data read by 'sql'"),
    ("task: t\ndataset_kwargs: {data_files: {test: ['http://x/y.json']}}\n", "data from an address"),
]


@pytest.mark.parametrize(("content", "reason"), CODE)
@pytest.mark.parametrize("included", [False, True])
def test_task_files_that_can_run_code_are_refused(content, reason, included, tmp_path, call, folder):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if included:
        (tmp_path / "template.txt").write_text(content)
        (folder / "deep").mkdir()
        (folder / "deep" / "t.yaml").write_text("task: t\n<<: {include: [../../template.txt]}\n")
    else:
        (folder / "t.yaml").write_text(content)
    status, _, err = call("--include_path", folder, "--tasks", "colours")
    assert (status, err.count("\n")) == (2, 1)
    assert f"{reason} can run code or fetch it; give --allow_code" in err
    assert not (tmp_path / "ran").exists()


def test_code_that_is_allowed_runs(folder, call):
    (folder / "shout.py").write_text("def text(doc):\n    return doc['question'].upper()\n")
    (folder / "loud.yaml").write_text("include: colours.yaml\ntask: loud\ndoc_to_text: !function shout.text\n")
    words = ["--include_path", folder, "--tasks", "loud"]
    assert call(*words)[0] == 2
    status, out, err = call(*words, "--allow_code")
    assert status == 0, err
    assert "loud" in out


def test_templates_cannot_reach_what_runs_code(folder, call):
    (folder / "sly.yaml").write_text(
        "include: colours.yaml\ntask: sly\ndoc_to_text: \"{{ ''.__class__.__mro__[1].__subclasses__() }}\"\n"
    )
    status, _, err = call("--include_path", folder, "--tasks", "sly")
    assert status == 2
    assert "unsafe" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [("task: [", "cannot read the task file"), ("include: missing.yaml\ntask: t", "missing.yaml, included by")],
)
def test_task_files_that_cannot_be_read_are_named(content, message, folder, call):
    (folder / "t.yaml").write_text(content)
    status, _, err = call("--include_path", folder, "--tasks", "colours")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks", "colour"], "unknown task 'colour'; did you mean 'colours'?"),
        (["--tasks", "everything,words"], "'words' of 'words' is named twice"),
        (["--tasks", ","], "--tasks names no task"),
        (["--tasks", "words", "--limit", "0"], "--limit 0: should be 1 or more"),
        (["--tasks", "words", "--include_path", "nowhere"], "no folder nowhere"),
        (["--tasks", "words", "--out", "nowhere/a.json"], "nowhere/a.json"),
    ],
)
def test_mistakes_are_told_in_one_line(argv, message, folder, call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, _, err = call("--include_path", folder, *argv)
    assert status == 2
    assert message in err.splitlines()[-1]


OFFLINE = """
import pathlib, sys
def audit(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        raise RuntimeError(f"network: {event} {args}")
sys.addaudithook(audit)
from dcvit import cli, lm_eval
lm_eval.run_config = lambda args, overrides: (None, pathlib.Path("somewhere"))
for tasks in ("piqa", "lambada_openia"):
    assert cli.run(lm_eval.main, ["--tasks", tasks]) == 2
"""


def test_the_librarys_own_tasks_without_their_data(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cached, named = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert cached.startswith("error: task 'piqa': ")
    assert cached.endswith("--online downloads what is not in the local cache")
    assert "did you mean 'lambada_openai'?" in named
    assert "network" not in done.stderr


def test_without_the_library_the_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "run_config", lambda args, overrides: (None, tmp_path))
    assert cli.run(command.main, ["--tasks", "piqa"]) == 2
    assert 'pip install "dcvit[eval]"' in capsys.readouterr().err


def test_results_become_plain_values():
    found = command.plain({1: np.float32(0.5), "f": command.plain, "x": [float("nan"), np.True_, {2}, None, "s"]})
    assert found == {"1": 0.5, "f": "plain", "x": [None, True, [2], None, "s"]}
    assert json.dumps(found, allow_nan=False)
