"""configs/lm_pile.py: its table of presets, its recipe, and whole runs on a tiny text."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dcvit import cli, generate, tokenize, train
from dcvit.config import load as configs
from dcvit.hub import kinds
from dcvit.parallel.trees import by_name
from dcvit.runs import metrics
from dcvit.training import optim, setup

pytestmark = pytest.mark.usefixtures("library_promotion")

PILE = Path(__file__).resolve().parents[2] / "configs" / "lm_pile.py"


@pytest.mark.slow
def test_all_parameters_but_scales_and_biases_decay():
    config = configs.load(f"{PILE}:preset=DCFormer++-405M")
    shapes = setup.param_shapes(kinds.make_model(config), jax.ShapeDtypeStruct((1, 16), jnp.int32))
    decays = optim.first_match(shapes, config.wd_mults, 0.0, "wd_mults")
    for name, rate in by_name(decays).items():
        assert rate == (0.0 if name.endswith(("scale", "bias")) else 1.0), name


@pytest.fixture
def tokens(tmp_path):
    """Write a Megatron pair of byte tokens with the tokenize command; return its folder."""
    (tmp_path / "text").mkdir()
    for i in range(6):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox. " * 100)
    assert cli.run(tokenize.main, ["--data", str(tmp_path / "text"), "--out", str(tmp_path / "pile" / "all")]) == 0
    return tmp_path / "pile"


@pytest.mark.weekly
def test_config_trains_evaluates_and_generates(tokens, tmp_path, capsys):
    """The unmodified config on a small text, up to generation."""
    arguments = f"data_dir={tokens},context=32,validation=16,runlocal=true"
    argv = ["--config", f"{PILE}:{arguments}", "--workdir", str(tmp_path / "w"), "--config.input.batch_size=8"]
    argv += [f"--config.{section}vocab_size=320" for section in ("", "input.data.", "evals.validation.data.")]
    assert cli.run(train.main, [*argv, "--config.tensorboard=false"]) == 0
    rows = metrics.read(tmp_path / "w" / "metrics.jsonl")
    assert [row["step"] for row in rows if "validation/loss" in row] == [0, 6, 12]
    # 6 · 2113 tokens are 384 rows of 33 and a last row of 6 tokens, 5 of them targets
    assert (rows[-1]["validation/tokens"], rows[-1]["validation/documents"]) == (15 * 32 + 5, 1)
    assert rows[-1]["validation/bytes"] == 15 * 32 + 4
    assert rows[-1]["loss"] < rows[1]["loss"]
    capsys.readouterr()
    # the description of the pair states that its tokens are bytes
    assert cli.run(generate.main, ["--workdir", str(tmp_path / "w"), "--prompt", "the ", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    shutil.rmtree(tokens)
    assert cli.run(generate.main, ["--workdir", str(tmp_path / "w"), "--prompt", "the "]) == 2
    assert "give --tokenizer" in capsys.readouterr().err
