"""Bad inputs end in one line that states the facts, with the documented exit status, and change nothing on disk.

One table of mistakes that people make in configs, data, checkpoints and command lines, all run in this process.
"""

import functools
import pickle
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict
from PIL import Image
from trained_workdirs import DIGITS, TINY

from dcvit.__main__ import dispatch
from dcvit.cli import run
from dcvit.training import setup, step

SEVEN = Path(__file__).parents[1] / "data" / "seven.png"
NOT_UTF8 = b"good line\nbad \xff\xfe line\n" * 20
# With a layer, because the fields of a layer are checked where it is built.
TINY_VIT = [f"{key}={value}" for key, value in (TINY | {"model.depth": 1, "total_steps": 2, "ckpt_steps": 1}).items()]
DIGITS_CONFIG = f"""from dcvit.config import load as c
def get_config():
    config = c.load("vit_digits", {[word for word in TINY_VIT if word.startswith("model.")]}).unlock()
    {{}}
    return config
"""


class Bad(NamedTuple):
    """A command line that must fail, after `prepare` has changed its folder, and the facts that its error contains.

    Words may have folders in braces: of the test, a workdir that does not exist, and copies of completed runs.
    """

    words: list
    facts: tuple
    prepare: object = None
    notice: str | None = None  # part of each line that is printed before the error

    def after(self, prepare, **fields):
        return self._replace(prepare=prepare, **fields)


def command(*words, facts):
    return Bad([str(word) for word in words], (facts,) if isinstance(facts, str) else facts)


def train(config, *options, facts, workdir="{new}"):
    return command("train", "--config", config, "--workdir", workdir, *options, facts=facts)


def vit(*changes, facts, **options):
    """A new training run on images, with overrides such as "seed=1"."""
    return train("vit_digits", *(f"--config.{word}" for word in [*TINY_VIT, *changes]), facts=facts, **options)


def resume(*changes, facts, accept=()):
    """The completed image run again, with overrides and accepted changes."""
    original = [f"{key}={value}" for key, value in DIGITS.items()]
    words = [f"--config.{word}" for word in [*original, *changes]]
    return train("vit_digits", *words, *(f"--accept={key}" for key in accept), facts=facts, workdir="{vit}")


def evaluate(*options, facts):
    return command("evaluate", "--workdir", "{vit}", *options, facts=facts)


def predict(*options, facts):
    return command("predict", "--workdir", "{vit}", *options, facts=facts)


def generate(*options, facts):
    return command("generate", "--workdir", "{lm}", *options, facts=facts)


def file(name, content):
    """Write a file of a folder, by default that of the test."""

    def prepare(folders):
        path = Path(name.format_map(folders))
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def config_file(source, *facts):
    """A training run whose config file has this content."""
    return train("{folder}/mine.py", facts=facts).after(file("{folder}/mine.py", source))


def remove(name):
    def prepare(folders):
        path = folders["vit"] / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return prepare


def damage(item):
    """Flip a bit in the middle of the largest file of an item of the last checkpoint."""

    def prepare(folders):
        paths = (path for path in (folders["vit"] / "checkpoints/60" / item).rglob("*") if path.is_file())
        path = max(paths, key=lambda path: (path.stat().st_size, path.name))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return prepare


def cut_metrics(folders):
    """Remove half of the second line of metrics.jsonl."""
    path = folders["vit"] / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][: len(lines[1]) // 2]
    path.write_bytes(b"\n".join(lines))


class Unpickled:
    """An object that prints when it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def one_class(folders):
    """Write eight images of one class for training, and for validation."""
    for split in ("train", "val"):
        (folder := folders["folder"] / "pets" / split / "cat").mkdir(parents=True)
        for i in range(8):
            Image.new("L", (8, 8), i).save(folder / f"{i}.png")


PP = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)|onehot({{num_classes}})|keep('image', 'labels')"
PETS = "{{'kind': 'folder', 'data_dir': '{folder}/pets'}}"
MISSPELT = {  # override -> the correct spelling, which the error suggests
    "total_epoch=1": "total_epochs",
    "model.widht=1": "width",
    "model_name=vitt": "vit",
    "model.variant=DCViT-Tii/16": "Ti",
    "optax_name=scale_by_adamm": "scale_by_adam",
    "mesh=[('dta', -1)]": "data",
    "ckpt_best=('test/topp1', 'max')": "test/top1",
    "ckpt_best=('test/accuracy', 'max')": "did you mean 'test/top1'",
}
BAD_CONFIGS = {
    "syntax error": config_file("def get_config(:\n", "mine.py: SyntaxError"),
    "get_config raises": config_file(
        "def get_config():\n    raise ValueError('one\\ntwo')\n", "mine.py: ValueError: one"
    ),
    "argument of another type": train("vit_digits:epochs=x", facts=("epochs=x", "int")),
    "unknown key set by the file": config_file(
        DIGITS_CONFIG.format("config.lrr = 1.0"), "mine.py", "'config.lrr'", "'lr'"
    ),
    "no data": config_file(DIGITS_CONFIG.format("del config.input['data']"), "config.input.data"),
    "evaluator without preprocessing": config_file(
        DIGITS_CONFIG.format("del config.evals.test['pp']"), "missing", "pp"
    ),
    "removed key": vit("mlflow.experiment=a", facts=("config.mlflow", "removed in 0.3.0")),
    "number above the largest float": vit(f"lr={10**400}", facts="int too large to convert to float"),
    "more frozen layers than there are": vit("freeze_layers=99", facts=("freeze_layers=99", "the number of blocks")),
    "profile beyond the last step": vit("profile=(9,10)", facts="config.profile=(9, 10)"),
    "optimizer argument that is a word": vit("optax.b1=much", facts="b1"),
    "z-loss of images": vit("z_loss=0.1", facts=("config.z_loss=0.1", "language models")),
    "folder of one class": vit(
        f"input.data={PETS}", f"input.pp={PP}", "input.batch_size=8", "num_classes=None", "evals={{}}",
        facts=("config.num_classes=1", "'cat'"),
    ).after(one_class, notice="images of 1 classes"),
}  # fmt: skip
BAD_CHECKPOINTS = {
    "resume with a damaged state": resume(facts=("checkpoints/60 is damaged", "rest/")).after(damage("rest")),
    "evaluate damaged weights": evaluate(facts=("--checkpoint", "checkpoints/30")).after(damage("ema")),
    "checksums missing": resume(facts="SHA256SUMS").after(remove("checkpoints/60/SHA256SUMS")),
    "config.json missing and another model": resume("model.width=16", facts="/vit").after(remove("config.json")),
    "metrics damaged before the last line": resume(facts=("metrics.jsonl:2", "damaged")).after(cut_metrics),
    "data.json of other classes": predict(SEVEN, facts=("data.class_names", "['a', 'b']")).after(
        file("{vit}/data.json", '{"class_names": ["a", "b"]}')
    ),
    "accepted.json damaged": resume(facts="accepted.json").after(file("{vit}/accepted.json", '{"accept": 3}')),
    "run without a checkpoint": evaluate(facts="no checkpoint").after(remove("checkpoints")),
    "start from another model's weights": vit("model_init={lm}", facts=("head/kernel", "model")),
    "predict with a language model": command("predict", "--workdir", "{lm}", SEVEN, facts="dcvit generate"),
    "generate with an image model": command("generate", "--workdir", "{vit}", "--prompt", "d", facts="language model"),
    "weights that are a pickle": vit("model_init={folder}/weights.npz", facts="weights.npz").after(
        file("{folder}/weights.npz", pickle.dumps({"head/kernel": Unpickled()}))
    ),
    "workdir below a file": vit(workdir="{folder}/file/run", facts=("workdir", "/file/run")).after(
        file("{folder}/file", "")
    ),
    "fewer steps than completed": resume("total_steps=1", accept=["total_steps"], facts=("step 60", "1 steps")),
    "accept an unknown key": resume(accept=["lrr"], facts=("--accept lrr", "'lr'")),
}
BAD_COMMAND_LINES = {
    "misspelt command": command("trian", facts="train"),
    "train without a workdir": command("train", "--config", "vit_digits", facts="--workdir"),
    "incomplete cluster options": train("vit_digits", "--num_processes=2", facts=("--coordinator", "--process_id")),
    "override but no config": evaluate("--config.seed=1", facts=("--config.KEY=VALUE", "--config")),
    "report of a language model": command(
        "evaluate", "--workdir", "{lm}", "--report", "{folder}/r.html", facts=("--report", "'classification'")
    ),
    "more tokens than the context": generate("--prompt", "def", "--tokens", 9999, facts="context"),
    "prompt file that is not UTF-8": generate("--prompt_file", "{folder}/p.txt", facts=("p.txt", "not UTF-8")).after(
        file("{folder}/p.txt", NOT_UTF8)
    ),
    "compare by an unknown metric": command(
        "compare", "{vit}", "--metric", "test/mean_recal", facts="test/mean_recall"
    ),
    "removed option": command("compare", "{vit}", "--group", "seed", facts=("--group", "removed in 0.3.0")),
    "tokenize missing data": command("tokenize", "--data", "{folder}/none", "--out", "{folder}/t", facts="no files at"),
}
BAD_INPUTS = {
    **BAD_CONFIGS,
    **{change: vit(change, facts=right) for change, right in MISSPELT.items()},
    **BAD_CHECKPOINTS,
    **BAD_COMMAND_LINES,
}


class Folders(dict):
    """The folders of a test by the names that words have in braces; completed runs are copied when they are used."""

    def __missing__(self, name):
        self[name] = Path(shutil.copytree(self["completed"][name], self["folder"] / name))
        return self[name]


@pytest.fixture
def folders(tmp_path, digits_workdir, lm_workdir, library_promotion):
    completed = {"vit": digits_workdir, "lm": lm_workdir}
    return Folders(folder=tmp_path, new=tmp_path / "new", completed=completed)


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """Trace each model, and build the setup of each valid config, once: this takes most of the time of most rows."""
    shapes, make, made = functools.cache(setup.param_shapes), setup.make_setup, {}

    def make_once(config: ConfigDict, **options: Path) -> setup.Setup:
        key = config.to_json()
        if key not in made:
            made[key] = make(config, **options)
        return made[key]

    def zeros(run: setup.Setup, key: jax.Array) -> setup.Params:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes(run.model.module, run.task.example))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "param_shapes", shapes)
        patch.setattr(setup, "make_setup", make_once)
        patch.setattr(step, "init_params", zeros)
        yield


@pytest.fixture(scope="module")
def compiled():
    """The names of the programs that XLA compiled, or JAX read from its cache on disk, since the first test."""
    names: list[str] = []

    def listen(event: str, seconds: float, **about: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def contents(folder):
    """Every file of a run except the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def mentions(line, fact):
    """True if a line contains a text that is not part of a longer word."""
    start = r"(?<![\w+-])" if re.match(r"[\w+-]", fact) else ""
    end = r"(?![\w+-])" if re.search(r"[\w+-]$", fact) else ""
    return re.search(f"{start}{re.escape(fact)}{end}", line) is not None


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_line_with_its_facts_and_changes_nothing(name, folders, compiled, capsys):
    row = BAD_INPUTS[name]
    if row.prepare:
        row.prepare(folders)
    argv = [word.format_map(folders) for word in row.words]
    before = {folder: contents(folders[folder]) for folder in ("vit", "lm") if folder in folders}
    compiled_before = len(compiled)
    capsys.readouterr()
    status = run(dispatch, argv)
    out, err = capsys.readouterr()
    assert status == 2, err
    assert err.endswith("\n")
    *notices, line = err.splitlines()
    assert line.startswith("error: "), err
    assert bool(notices) == (row.notice is not None), err
    assert all(row.notice in notice for notice in notices), err
    assert [fact for fact in row.facts if not mentions(line, fact)] == [], line
    assert "Traceback" not in out + err
    assert "unpickled" not in out
    assert not folders["new"].exists()
    assert compiled[compiled_before:] == []
    for folder, content in before.items():
        assert contents(folders[folder]) == content
