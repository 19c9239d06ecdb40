"""The command generate, with a model that writes a known sentence."""

import json

import pytest
from language_models import chain_model

from dcvit import cli
from dcvit import generate as command
from dcvit.inference.texts import LanguageModel
from input_pipeline.text.tokenizer import ByteTokenizer

SENTENCE = "xé世🎉 go"  # all bytes differ, so that they form a chain


@pytest.fixture
def say(monkeypatch, capsys):
    """Run the command with a model that writes SENTENCE and end; return (exit status, stdout, stderr)."""
    model = chain_model([*SENTENCE.encode(), 256], [256, *b"AB", 256])
    opened = LanguageModel(*model, config={}, open_tokenizer=lambda path: ByteTokenizer())
    monkeypatch.setattr(cli, "check_model", lambda *options: None)
    monkeypatch.setattr(cli, "open_model", lambda *options: None)
    monkeypatch.setattr(LanguageModel, "of", lambda _: opened)

    def run(*words):
        status = cli.run(command.main, list(words))
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_prompt_and_text_are_printed_while_they_are_generated(say, monkeypatch):
    shown = []
    write = command.write
    monkeypatch.setattr(command, "write", lambda text: (shown.append(text), write(text)))
    status, out, err = say("--prompt", "x", "--temperature", "0")
    assert (status, out) == (0, SENTENCE + "\n")
    assert [piece for piece in shown if piece] == ["xé"[:1], *SENTENCE[1:], "\n"]
    assert err.count("\n") == 1
    assert err.startswith("12 tokens, ")
    assert err.endswith(" tokens/s\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_are_not_printed_on_a_terminal(monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    command.write("a\x1b[2J\n\té\x9b\x07")
    assert capsys.readouterr().out == ("a\ufffd[2J\n\té\ufffd\ufffd" if terminal else "a\x1b[2J\n\té\x9b\x07")


@pytest.mark.slow
def test_several_prompts_form_a_batch(say, tmp_path):
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
