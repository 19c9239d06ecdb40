"""configs/lm_text.py: training on text of one's own, with bytes, a given tokenizer, or one trained on the text."""

import pytest

from dcvit import cli, evaluate, generate, train
from dcvit.config import load as configs
from dcvit.errors import ConfigError, InputError
from dcvit.training.setup import make_setup
from input_pipeline.text.files import train_tokenizer

pytestmark = pytest.mark.usefixtures("library_promotion")
TINY = [
    "tensorboard=False", "model.width=16", "model.depth=1", "model.num_heads=2", "model.mlp_dim=16",
    "model.compose=None",
]  # fmt: skip


@pytest.fixture
def books(tmp_path):
    """Two files, of which the second is the end of the text."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    (folder / "b.txt").write_text("Call me Ishmael. " * 40)
    return folder


def setup(arguments, evaluators=True):
    spec, *words = f"lm_text:{arguments}".split()
    return make_setup(configs.load(spec, [*TINY, *words]), evaluate=evaluators)


def command(arguments, workdir):
    words = [f"--config.{word}" for word in (*TINY, "total_steps=2", "input.batch_size=8")]
    return cli.run(train.main, ["--config", f"lm_text:{arguments}", "--workdir", str(workdir), *words])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "file"])
def test_the_end_of_the_text_is_held_out(books, form):
    """Also of a single file, which is one document."""
    path = books if form == "folder" else books / "a.txt"
    run = setup(f"data_dir={path},context=32,val_fraction=0.2")
    held_out = run.evaluators["validation"].source
    rows = [source[i]["tokens"] for source in (run.data.source, held_out) for i in range(len(source))]
    text = b"".join(file.read_bytes() + b"\0" for file in ([path] if form == "file" else sorted(books.iterdir())))
    stream = bytes(int(t) % 256 for row in rows for t in row)
    assert stream.rstrip(b"\0") == text.rstrip(b"\0")
    assert len(held_out) == round(len(rows) * 0.2)


@pytest.mark.exhaustive
def test_a_moved_workdir_generates_evaluates_and_resumes_with_its_own_tokenizer(books, tmp_path, capsys):
    arguments = f"data_dir={books},context=16,tokenizer=train,vocab_size=300"
    assert command(arguments, tmp_path / "run") == 0
    tokenizer = (tmp_path / "run" / "tokenizer.json").read_text()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    words = ["--workdir", str(moved)]
    assert cli.run(generate.main, [*words, "--prompt", "It was", "--tokens", "4"]) == 0
    assert cli.run(evaluate.main, [*words, "--format", "json"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    assert command(arguments, moved) == 0
    assert (moved / "tokenizer.json").read_text() == tokenizer
    (moved / "tokenizer.json").unlink()
    assert cli.run(generate.main, [*words, "--prompt", "It was"]) == 2
    assert f"cannot read {moved}/tokenizer.json, the run's tokenizer" in capsys.readouterr().err
    assert command(arguments, moved) == 0  # trained again on the same text
    assert (moved / "tokenizer.json").read_text() == tokenizer


@pytest.mark.slow
def test_resumed_run_uses_the_tokenizer_of_its_workdir(books, tmp_path):
    """The text may have changed, which `--accept data` allows."""
    stored = train_tokenizer(str(books / "a.txt"), 280)
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "run" / "tokenizer.json").write_text(stored)
    config = configs.load(f"lm_text:data_dir={books},context=16,vocab_size=300", TINY)
    assert make_setup(config, workdir=tmp_path / "run", evaluate=False).tokenizer == stored
    assert make_setup(config, workdir=tmp_path / "new", evaluate=False).tokenizer != stored


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data_dir=/nowhere", "no files at /nowhere: expected a file, a glob, or a folder of files ending in .txt"),
        ("data_dir={short}", "2 examples of 256 tokens do not fill one batch of 16: set --config.input.batch_size"),
    ],
)
def test_unusable_text_is_an_error_that_says_what_to_set(tmp_path, arguments, message):
    (tmp_path / "short.txt").write_text("a few words " * 40)
    with pytest.raises((ConfigError, InputError), match=message):
        setup(arguments.format(short=tmp_path / "short.txt"))
