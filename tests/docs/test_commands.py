"""The commands and the code of pages run as written, on the data that the pages make or on generated images."""

import html
import json
import re
import shlex
from pathlib import Path

import fake_hub
import image_datasets
import numpy as np
import pytest
from markdown_pages import PAGES, blocks, commands, run_commands
from PIL import Image
from trained_workdirs import load_params

import dcvit
from dcvit import __main__, cli
from dcvit.parallel.trees import by_name
from dcvit.runs import metrics

MARKER = "<!-- run by tests/docs/test_commands.py -->"
pytestmark = pytest.mark.usefixtures("library_promotion")


def marked(language, text, marker=MARKER):
    """The only block with a text that follows the marker, on any page."""
    (block,) = (block for page in PAGES for block in blocks(page, language, marker) if text in block)
    return block


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the block with a text in the folder of the test, which is the working folder."""
    monkeypatch.chdir(tmp_path)

    def run(language, text):
        block = marked(language, text)
        if language == "python":
            exec(compile(block, text, "exec"), {})
        else:
            run_commands(commands(block), tmp_path, monkeypatch)

    return run


def test_every_marked_block_is_run_by_a_test_of_this_file():
    texts = set(re.findall(r"(?:run|marked)\(\"(?:python|bash|sh)\", \"(.*?)\"[,)]", Path(__file__).read_text()))
    for page in PAGES:
        for language in ("python", "bash", "sh"):
            for block in blocks(page, language, MARKER):
                assert any(text in block for text in texts), f"{page.name}: {block}"


def test_statistics_of_channels_are_those_on_the_page(run, capsys):
    pytest.importorskip("tifffile")
    run("python", "tifffile")
    run("bash", "--statistics")
    shown = marked("", "channel ", "<!-- printed by the command above -->")
    found = capsys.readouterr().out
    assert all(part.strip() in found for part in shown.split("…"))


@pytest.mark.weekly
def test_a_run_on_channels(run, capsys):
    for library in ("tifffile", "tensorflow"):
        pytest.importorskip(library)
    run("python", "tifffile")
    run("bash", "runs/land_run")
    assert metrics.read(Path("runs/land_run/metrics.jsonl"))[-1]["val/top1"] > 0.8
    assert re.search(r"val/water/0\.tif +(crops|forest|town|water) ", capsys.readouterr().out)
    assert "They show the first of 13 channels." in Path("runs/land.html").read_text()
    assert Path("runs/land_explore.html").exists()


def write_pets(folder):
    """Write two classes of small images, which differ in their brighter half."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 10)):
        for label, half in (("cat", slice(0, 6)), ("dog", slice(6, 12))):
            (folder / split / label).mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 160, (12, 12, 3), dtype=np.uint8)
                image[:, half] += 60
                Image.fromarray(image).save(folder / split / label / f"{i}.png")


@pytest.mark.weekly
def test_fine_tuning(run, tmp_path):
    write_pets(tmp_path / "pets")
    run("bash", "runs/average")
    assert "Calibration error" in Path("runs/average.html").read_text()
    a, b, mean = (by_name(load_params(Path("runs", name))) for name in ("a", "b", "average"))
    for name, value in mean.items():
        np.testing.assert_allclose(value, (np.asarray(a[name], np.float64) + b[name]) / 2, rtol=1e-6, atol=1e-9)
    start = by_name(dcvit.load("digits").params)
    first = [name for name in start if name.startswith(("embedding/", "Transformer/encoderblock_0/"))]
    for name in first:
        np.testing.assert_allclose(a[name], start[name], rtol=1e-5, atol=1e-7)  # frozen; an average of equal numbers
    assert any((b[name] != start[name]).any() for name in first)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub, in an upload
def test_the_hub(run, tmp_path, monkeypatch, capsys):
    """Against a local server with its protocol."""
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub; pip install -e .[hub]")
    lines = commands(marked("bash", "hf:owner"))
    with fake_hub.serve() as hub:
        fake_hub.use(monkeypatch, hub, tmp_path / "cache")
        run_commands(lines, tmp_path, monkeypatch)
        commit = hub.branches["owner/digits"]["main"]
        run("python", "hf:owner")
    printed = capsys.readouterr().out
    assert f"uploaded as hf:owner/digits@{commit}" in printed
    assert f"owner/digits@{commit[:12]} " in printed
    assert f'"model_init": "hf:owner/digits@{commit}"' in Path("runs/tuned/config.json").read_text()


@pytest.mark.weekly
def test_several_labels(run, capsys):
    run("python", "colors/labels.csv")
    run("bash", "colors/labels.csv")
    out = capsys.readouterr().out
    assert "config.input.data: 160 read, 0 damaged" in out
    first, *_, last = metrics.read(Path("runs/colors/metrics.jsonl"))
    assert last["val/n"] == 72
    assert last["val/mean_ap"] > max(first["val/mean_ap"], 0.8)
    chosen = json.loads(Path("runs/colors/thresholds.json").read_text())
    assert (chosen["evaluation"], chosen["step"]) == ("val", last["step"])
    assert [*chosen["thresholds"]] == ["blue", "green", "red"]
    page = html.unescape(Path("runs/colors.html").read_text())
    assert f"The thresholds maximize F1 on 'val' at step {last['step']}" in page
    assert "Confusion matrix" not in page
    assert re.search(r"colors/images/0\.png +(red|green|blue|none)", out)


FASTER = [
    "model.variant=ViT-mu/16", "total_epochs=None", "total_steps=2", "input.batch_size=8", "ckpt_epochs=None",
    "input.pack={'images': 1, 'rows': 1, 'tokens': 1024}", "evals.val.batch_size=12",
]  # fmt: skip


@pytest.mark.weekly
def test_native_aspect_ratios(tmp_path, monkeypatch, capsys):
    """With a smaller model than that of the page."""
    pytest.importorskip("tensorflow")
    image_datasets.image_folder(tmp_path / "pets")
    monkeypatch.chdir(tmp_path)
    train, predict = (shlex.split(line)[1:] for line in commands(marked("sh", "patches(16, 256)")))
    assert cli.run(__main__.dispatch, [*train, *(f"--config.{option}" for option in FASTER)]) == 0
    assert metrics.read(tmp_path / "runs/native/metrics.jsonl")[-1]["val/n"] == 12
    capsys.readouterr()
    assert cli.run(__main__.dispatch, predict) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.weekly
def test_the_code_about_native_aspect_ratios_prints_what_it_says(run, capsys):
    run("python", "one_per_row")
    assert f"logits.shape)  # {capsys.readouterr().out.strip()}" in marked("python", "one_per_row")


@pytest.mark.weekly
def test_own_images(run, tmp_path, monkeypatch, capsys):
    """With generated photographs in place of those of the package."""
    image_datasets.solar_cell_package(tmp_path / "site", 80)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    run("python", "elpv_dataset")
    run("bash", "runs/solar_cells")
    written = {path.name for path in Path("runs").iterdir()}
    assert written >= {"solar.html", "solar_explore.html", "solar.png"}
    assert {"val/top1", "val/mean_recall"} <= {*metrics.read(Path("runs/solar/metrics.jsonl"))[-1]}
    assert re.search(r"cell0014\.png +(defective|functional)", capsys.readouterr().out)


@pytest.mark.weekly
def test_the_commands_of_the_quickstart(run):
    run("bash", "runs/both.png")
    assert Path("runs/both.png").exists()


@pytest.mark.weekly
def test_runs_are_compared(run):
    run("bash", "runs/wide")
    assert Path("runs/curves.png").exists()


@pytest.mark.weekly
def test_distillation(tmp_path, monkeypatch, capsys):
    """With a shorter run than that of the page."""
    first, *rest = commands(marked("bash", "config.distill"))
    short = "--config.total_steps=2 --config.evals={} --config.model.depth=1 --config.model.compose=None"
    run_commands([f"{first} {short}", *rest], tmp_path, monkeypatch)
    assert "seven.png" in capsys.readouterr().out
