"""The page about the Hugging Face Hub: its commands and its code run, against a local server with its protocol."""

import fake_hub
import pytest
from markdown_pages import ROOT, blocks, commands, run_commands

PAGE = ROOT / "docs" / "hub.md"
MARKER = "<!-- run by tests/docs/test_hub.py -->"

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub; pip install -e .[hub]")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("library_promotion")
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub, in an upload
def test_the_commands_and_the_code_of_the_page_run(tmp_path, monkeypatch, capsys):
    lines = [line for block in blocks(PAGE, "bash", MARKER) for line in commands(block)]
    (code,) = blocks(PAGE, "python", MARKER)
    with fake_hub.serve() as hub:
        fake_hub.use(monkeypatch, hub, tmp_path / "cache")
        run_commands(lines, tmp_path, monkeypatch)
        commit = hub.branches["owner/digits"]["main"]
        exec(compile(code, PAGE.name, "exec"), {})
    printed = capsys.readouterr().out
    assert f"uploaded as hf:owner/digits@{commit}" in printed
    assert f"owner/digits@{commit[:12]} " in printed
    assert f'"model_init": "hf:owner/digits@{commit}"' in (tmp_path / "runs" / "tuned" / "config.json").read_text()
