"""Builders of bad inputs: command lines, and the files that they read."""

import contextlib
import fcntl
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trained_workdirs import DIGITS, TINY

# With a layer, because the fields of a layer are checked where it is built.
TINY_VIT = [f"{key}={value}" for key, value in (TINY | {"model.depth": 1, "total_steps": 2, "ckpt_steps": 1}).items()]
TINY_LM = [
    *("tensorboard=False", "ckpt_steps=1", "total_steps=2", "schedule.warmup_percent=0", "input.batch_size=8"),
    *("model.width=16", "model.depth=1", "model.num_heads=2", "model.mlp_dim=16", "model.compose=None"),
]
SEVEN = Path(__file__).parents[1] / "data" / "seven.png"
DIGITS_CONFIG = f"""from dcvit.config import load as c
def get_config():
    config = c.load("vit_digits", {[word for word in TINY_VIT if word.startswith("model.")]}).unlock()
    {{}}
    return config
"""


class Workspace:
    """A folder for one test: `new` is a workdir that does not exist, `vit` and `lm` are copies of completed runs."""

    def __init__(self, folder: Path, completed: dict[str, Path], stack: contextlib.ExitStack):
        self.folder, self.new = folder, folder / "new"
        self._completed, self._stack = completed, stack
        self.copies: dict[str, Path] = {}

    def _copy(self, name: str) -> Path:
        if name not in self.copies:
            self.copies[name] = Path(shutil.copytree(self._completed[name], self.folder / name))
        return self.copies[name]

    @property
    def vit(self) -> Path:
        return self._copy("vit")

    @property
    def lm(self) -> Path:
        return self._copy("lm")

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file, with the folders above it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def lock(self) -> None:
        """Lock the image run's workdir as another run does."""
        file = self._stack.enter_context((self.vit / ".lock").open("w"))
        file.write("process 1 on elsewhere, since yesterday\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)


Argv = Callable[[Workspace], list[str]]
Word = str | int | float | Path | Callable[[Workspace], Any]


@dataclass(frozen=True)
class BadInput:
    """A command line that must fail, and the facts that its one-line error must contain."""

    argv: Argv
    facts: tuple[str, ...]
    status: int = 2
    notice: str | None = None  # part of each line that is printed before the error
    starts: bool = False  # the error can only be found after the run has started


def bad(argv: Argv, *facts: str, **fields: Any) -> BadInput:
    return BadInput(argv, facts, **fields)


def misspelt(argv: Argv, correct: str) -> BadInput:
    """A misspelt name, for which the error must suggest the correct one."""
    return BadInput(argv, (correct,))


# Command lines. A word may be a function of the workspace.


def new(ws: Workspace) -> Path:
    return ws.new


def vit_run(ws: Workspace) -> Path:
    return ws.vit


def lm_run(ws: Workspace) -> Path:
    return ws.lm


def command(*words: Word) -> Argv:
    """A command line, whose functions are called with the workspace."""
    return lambda ws: [str(word(ws) if callable(word) else word) for word in words]


def after(prepare: Callable[[Workspace], Any], argv: Argv) -> Argv:
    """A command line for a workspace that `prepare` has changed."""

    def build(ws: Workspace) -> list[str]:
        prepare(ws)
        return argv(ws)

    return build


def overrides(words: tuple[Word, ...] | list[str]) -> list[Word]:
    def option(word: Word) -> Word:
        return (lambda ws: f"--config.{word(ws)}") if callable(word) else f"--config.{word}"

    return [option(word) for word in words]


def train(config: Word, *options: Word, workdir: Word = new) -> Argv:
    return command("train", "--config", config, "--workdir", workdir, *options)


def vit(*changes: Word, config: str = "vit_digits") -> Argv:
    """A new training run on images, with overrides such as "seed=1"."""
    return train(config, *overrides(TINY_VIT), *overrides(changes))


def lm(*changes: Word) -> Argv:
    """A new training run on text, with overrides."""
    return train("lm_stdlib", *overrides(TINY_LM), *overrides(changes))


def resume(*changes: Word, accept: tuple[str, ...] = ()) -> Argv:
    """The completed image run again, with overrides and accepted changes."""
    accepted = [word for key in accept for word in ("--accept", key)]
    original = [f"{key}={value}" for key, value in DIGITS.items()]
    return train("vit_digits", *overrides(original), *overrides(changes), *accepted, workdir=vit_run)


def evaluate(*options: Word) -> Argv:
    return command("evaluate", "--workdir", vit_run, *options)


def predict(*options: Word) -> Argv:
    return command("predict", "--workdir", vit_run, *options)


def generate(*options: Word) -> Argv:
    return command("generate", "--workdir", lm_run, *options)


def file(name: str, content: str | bytes) -> Callable[[Workspace], Path]:
    """A file in the workspace."""
    return lambda ws: ws.write(name, content)


def config_file(source: str | bytes) -> Argv:
    """A training run whose config file has this content."""
    return train(file("mine.py", source))


def digits_config(*statements: str) -> Argv:
    """A training run with the digits config after some statements."""
    return config_file(DIGITS_CONFIG.format("; ".join(statements)))


# Damage to the completed image run.


def overwrite(name: str, content: str | bytes) -> Callable[[Workspace], Any]:
    def change(ws: Workspace) -> None:
        (ws.vit / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def remove(name: str) -> Callable[[Workspace], Any]:
    def change(ws: Workspace) -> None:
        path = ws.vit / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def damage(step: int, item: str) -> Callable[[Workspace], Any]:
    """Flip a bit in the middle of the largest file of an item of a checkpoint."""

    def change(ws: Workspace) -> None:
        folder = ws.vit / "checkpoints" / str(step) / item
        path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p.name))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return change


def cut_second_line(name: str) -> Callable[[Workspace], Any]:
    def change(ws: Workspace) -> None:
        path = ws.vit / name
        lines = path.read_bytes().split(b"\n")
        lines[1] = lines[1][: len(lines[1]) // 2]
        path.write_bytes(b"\n".join(lines))

    return change


class Unpickled:
    """An object that prints when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def npz(kind: str) -> Callable[[Workspace], Path]:
    """An .npz file that cannot be loaded as the model's weights."""

    def write(ws: Workspace) -> Path:
        path = ws.folder / "weights.npz"
        if kind == "pickle":
            path.write_bytes(pickle.dumps({"head/kernel": Unpickled()}))
        elif kind == "objects":
            np.savez(path, **{"head/kernel": np.array([Unpickled()], dtype=object)})
        elif kind == "other model":
            np.savez(path, **{"body/kernel": np.zeros((3, 3), np.float32)})
        else:
            np.savez(path, **{"head/kernel": np.zeros((64, 10), np.float32)})
            path.write_bytes(path.read_bytes()[:-200])
        return path

    return write


# Data of images.

PP = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)|onehot({num_classes})|keep('image', 'labels')"


def images(name: str, count: int = 8) -> Callable[[Workspace], Path]:
    """A folder of images, with `count` images of each of two classes for training and as many for validation."""
    from PIL import Image

    def write(ws: Workspace) -> Path:
        for split in ("train", "val"):
            for label in ("cat", "dog"):
                (ws.folder / name / split / label).mkdir(parents=True)
                for i in range(count):
                    Image.new("L", (8, 8), i).save(ws.folder / name / split / label / f"{i}.png")
        return ws.folder / name

    return write


def image_folder(prepare: Callable[[Workspace], Path]) -> Argv:
    """A new training run that is trained and evaluated on a folder of images."""

    def argv(ws: Workspace) -> list[str]:
        folder = prepare(ws)
        data = {"kind": "folder", "data_dir": str(folder), "split": "train"}
        evals = {"val": {"type": "classification", "data": {**data, "split": "val"}, "pp": PP}}
        changes = [f"input.data={data}", f"input.pp={PP}", "input.batch_size=8", "num_classes=None", f"evals={evals}"]
        return vit(*changes)(ws)

    return argv


def with_file(name: str, content: str, prepare: Callable[[Workspace], Path]) -> Callable[[Workspace], Path]:
    """A folder in which one file is written or replaced."""

    def write(ws: Workspace) -> Path:
        folder = prepare(ws)
        ws.write(str(folder.relative_to(ws.folder) / name), content)
        return folder

    return write


# Data of text.


def text(data: Callable[[Workspace], dict[str, Any]], *changes: Word) -> Argv:
    """A new training run of a language model on some data."""
    return lm(lambda ws: f"input.data={data(ws)}", "evals={}", *changes)


def text_file(name: str, content: str | bytes, **options: Any) -> Callable[[Workspace], dict[str, Any]]:
    """Return a function that writes a text file and returns the options of a data source that reads it."""
    fields = {"kind": "text", "context": 16, **options}
    return lambda ws: {**fields, "path": str(ws.write(name, content))}


def token_file(ws: Workspace, change: Callable[[Path], Any] | None = None) -> Path:
    """A .bin/.idx pair of 500 tokens below 200; `change` is called with the path of the .idx file."""
    from input_pipeline.text.megatron_writer import MegatronWriter

    prefix = ws.folder / "pair"
    with MegatronWriter(str(prefix), {"vocab_size": 257, "end_of_text": 256}) as writer:
        writer.add(np.arange(500) % 200)
    prefix.with_suffix(".json").unlink()
    if change:
        change(prefix.with_suffix(".idx"))
    return prefix


def tokens(change: Callable[[Path], Any] | None = None, **options: Any) -> Callable[[Workspace], dict[str, Any]]:
    """Data in a .bin/.idx pair."""
    fields = {"kind": "megatron", "context": 16, "vocab_size": 257, **options}
    return lambda ws: {**fields, "path": str(token_file(ws, change))}


def json_lines(count: int) -> str:
    return "".join(json.dumps({"text": f"line {i} of several"}) + "\n" for i in range(count))
