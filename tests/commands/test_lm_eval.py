"""The command lm_eval on local task files, without a network."""

import csv
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip('lm_eval is not installed: pip install "dcvit[eval]"', allow_module_level=True)

from harness_library import END, direct, harness_library, made  # noqa: F401

from dcvit import cli
from dcvit import lm_eval as command
from dcvit.inference.texts import LanguageModel

pytestmark = pytest.mark.usefixtures("harness_library")


@pytest.fixture
def one():
    return made("DCFormer++")


def metric(name, aggregation, higher_is_better):
    return [{"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}]


@pytest.fixture
def folder(tmp_path):
    """Task files of the three kinds of requests, with five questions."""
    rows = [{"question": f"What color is number {i}?", "label": i % 2, "answer": "red"} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    colors = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test", "fewshot_split": "test", "output_type": "multiple_choice",
        "doc_to_text": "{{question}}", "doc_to_choice": ["red", "green"], "doc_to_target": "label",
        "metric_list": metric("acc", "mean", True),
    }  # fmt: skip
    words = {
        "include": "colors.yaml", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_choice": None,
        "doc_to_target": "{{question}}", "metric_list": metric("word_perplexity", "weighted_perplexity", False),
    }  # fmt: skip
    answers = {
        "include": ["colors.yaml"], "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "doc_to_choice": None, "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": metric("exact_match", "mean", True),
    }  # fmt: skip
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, task in (("colors", colors), ("words", words), ("answers", answers)):
        (tasks / f"{name}.yaml").write_text(json.dumps({"task": name, **task}))  # JSON is YAML
    (tasks / "everything.yaml").write_text("group: everything\ntask: [colors, words]\n")
    return tasks


def refuse(*arguments):
    raise RuntimeError(f"network: {arguments}")


@pytest.fixture
def call(one, monkeypatch, capsys):
    """Run the command on the small model and the local tasks only; return (exit status, stdout, stderr)."""
    from dcvit.inference import harness

    manager = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda **options: manager(**options, include_defaults=False))
    monkeypatch.setattr(cli, "open_model", lambda *options: None)
    monkeypatch.setattr(LanguageModel, "of", lambda opened: one.loaded)
    monkeypatch.setattr(cli, "check_model", lambda *options: None)
    for holder, name in ((socket.socket, "connect"), (socket.socket, "bind"), (socket, "getaddrinfo")):
        monkeypatch.setattr(holder, name, refuse)

    def run(*argv):
        capsys.readouterr()
        return cli.run(command.main, [str(a) for a in argv]), *capsys.readouterr()

    return run


@pytest.mark.exhaustive
def test_results_of_all_kinds_of_tasks_equal_forward_passes(one, folder, call):
    words = ["--include_path", folder, "--tasks", "colors,words,answers"]
    status, out, err = call(*words, "--format", "json")
    assert status == 0, err
    rows = {row["task"]: row for row in json.loads(out)}
    assert {name: row["metric"] for name, row in rows.items()} == {
        "colors": "acc", "words": "word_perplexity", "answers": "exact_match",
    }  # fmt: skip
    assert {(row["filter"], row["n"], row["num_fewshot"]) for row in rows.values()} == {("none", 5, 0)}
    questions = [f"What color is number {i}?" for i in range(5)]
    right, nats, count = 0, 0.0, 0
    for i, question in enumerate(questions):
        choices = [[*(question + choice).encode()] for choice in (" red", " green")]
        scores = [direct(one, ids, len(ids) - len(question))[0] for ids in choices]
        right += int(np.argmax(scores)) == i % 2
        nats += direct(one, [END, *question.encode()], len(question))[0]
        count += len(question.split())
    assert rows["colors"]["value"] == right / 5
    assert rows["colors"]["stderr"] == pytest.approx(np.sqrt(right / 5 * (1 - right / 5) / 4))
    assert rows["words"]["value"] == pytest.approx(np.exp(-nats / count), rel=1e-4)
    words = ["--include_path", folder, "--tasks", "everything", "--limit", "2", "--num_fewshot", "1"]
    status, out, err = call(*words, "--batch_size", "3", "--format", "csv")
    assert status == 0, err
    rows = [(row["task"], row["n"], row["num_fewshot"]) for row in csv.DictReader(io.StringIO(out))]
    assert rows == [("colors", "2", "1"), ("words", "2", "1")]  # of the group


@pytest.mark.slow
def test_task_files_may_run_code(folder, call):
    (folder / "shout.py").write_text("def text(doc):\n    return doc['question'].upper()\n")
    (folder / "loud.yaml").write_text("include: colors.yaml\ntask: loud\ndoc_to_text: !function shout.text\n")
    status, out, err = call("--include_path", folder, "--tasks", "loud")
    assert status == 0, err
    assert "loud" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["color"], "'color' is not a registered task"),
        (["sly"], "'nothing' is undefined"),
        (["words", "--limit", "0"], "--limit: 0 should be an integer, 1 or more"),
        (["words", "--allow_code"], "unknown option --allow_code; removed in 0.3.0"),
    ],
)
def test_what_cannot_run_is_an_error_of_one_line(argv, message, folder, call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (folder / "sly.yaml").write_text('include: colors.yaml\ntask: sly\ndoc_to_text: "{{ nothing }}"\n')
    status, _, err = call("--include_path", folder, "--tasks", *argv)
    assert status == 2
    assert message in err.splitlines()[-1]


OFFLINE = """
import sys
def audit(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        raise RuntimeError(f"network: {event} {args}")
sys.addaudithook(audit)
from dcvit import errors, lm_eval
lm_eval.prepare(online=False)
from lm_eval.models.dummy import DummyLM
from dcvit.inference import harness
try:
    harness.evaluate_tasks(DummyLM(), ["piqa"])
except errors.ConfigError as e:
    print(e)
"""


@pytest.mark.weekly
def test_missing_data_of_the_librarys_tasks_is_an_error_and_not_downloaded(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lm_eval: ")
    assert done.stdout.count("\n") == 1
    assert "network" not in done.stdout


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.run(command.main, ["--tasks", "piqa", "--workdir", "."]) == 2
    assert 'pip install "dcvit[eval]"' in capsys.readouterr().err
