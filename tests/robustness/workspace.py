"""Builders of bad inputs: command lines, and the files that they read."""

import contextlib
import fcntl
import pickle
import shutil
from collections.abc import Callable, Iterable, Sequence
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

    def filled(self, word: "Word") -> str:
        """A word of a command line, with the folders in place of their names in braces."""
        text = str(word(self) if callable(word) else word)
        for name in ("folder", "new", "vit", "lm"):
            if f"{{{name}}}" in text:
                text = text.replace(f"{{{name}}}", str(getattr(self, name)))
        return text

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


# Command lines. A word may have the names of folders of the workspace in braces, or be a function of the workspace.


def command(*words: Word) -> Argv:
    return lambda ws: [ws.filled(word) for word in words]


def after(prepare: Callable[[Workspace], Any], argv: Argv) -> Argv:
    """A command line for a workspace that `prepare` has changed."""

    def build(ws: Workspace) -> list[str]:
        prepare(ws)
        return argv(ws)

    return build


def overrides(words: Iterable[str]) -> list[Word]:
    return [f"--config.{word}" for word in words]


def train(config: Word, *options: Word, workdir: Word = "{new}") -> Argv:
    return command("train", "--config", config, "--workdir", workdir, *options)


def vit(*changes: str, **options: Word) -> Argv:
    """A new training run on images, with overrides such as "seed=1"."""
    return train("vit_digits", *overrides(TINY_VIT), *overrides(changes), **options)


def lm(*changes: str) -> Argv:
    """A new training run on text, with overrides."""
    return train("lm_stdlib", *overrides(TINY_LM), *overrides(changes))


def resume(*changes: str, accept: tuple[str, ...] = ()) -> Argv:
    """The completed image run again, with overrides and accepted changes."""
    accepted = [word for key in accept for word in ("--accept", key)]
    original = [f"{key}={value}" for key, value in DIGITS.items()]
    return train("vit_digits", *overrides(original), *overrides(changes), *accepted, workdir="{vit}")


def evaluate(*options: Word) -> Argv:
    return command("evaluate", "--workdir", "{vit}", *options)


def predict(*options: Word) -> Argv:
    return command("predict", "--workdir", "{vit}", *options)


def generate(*options: Word) -> Argv:
    return command("generate", "--workdir", "{lm}", *options)


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


def cut_metrics(ws: Workspace) -> None:
    """Remove half of the second line of metrics.jsonl."""
    path = ws.vit / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][: len(lines[1]) // 2]
    path.write_bytes(b"\n".join(lines))


class Unpickled:
    """An object that prints when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def pickled(ws: Workspace) -> None:
    """Write weights.npz, which is a pickle."""
    (ws.folder / "weights.npz").write_bytes(pickle.dumps({"head/kernel": Unpickled()}))


# Data of images.

PP = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)|onehot({num_classes})|keep('image', 'labels')"


def one_class(ws: Workspace, classes: Sequence[str] = ("cat",)) -> None:
    """Write eight images of each class for training, and for validation."""
    from PIL import Image

    for folder in (f"{split}/{name}" for split in ("train", "val") for name in classes):
        (ws.folder / "pets" / folder).mkdir(parents=True)
        for i in range(8):
            Image.new("L", (8, 8), i).save(ws.folder / "pets" / folder / f"{i}.png")


def broken_image(ws: Workspace) -> None:
    """Write eight images of each of two classes for training, of which one is broken, and for validation."""
    one_class(ws, ("cat", "dog"))
    ws.write("pets/train/cat/0.png", "no image")


def image_folder() -> Argv:
    """A new training run that is trained and evaluated on a folder of images."""
    data = {"kind": "folder", "data_dir": "{folder}/pets", "split": "train"}
    evals = {"val": {"type": "classification", "data": {**data, "split": "val"}, "pp": PP}}
    return vit(f"input.data={data}", f"input.pp={PP}", "input.batch_size=8", "num_classes=None", f"evals={evals}")


# Data of text.


def text(kind: str, path: str, **options: object) -> Argv:
    """A new training run of a language model on some data."""
    data = {"kind": kind, "path": path, "context": 16, **options}
    return lm(f"input.data={data}", "evals={}")


def write_tokens(ws: Workspace) -> None:
    """Write a .bin/.idx pair of 500 tokens below 200."""
    from input_pipeline.text.megatron import write_pair

    write_pair(str(ws.folder / "pair"), [np.arange(500) % 200], {"vocab_size": 257, "end_of_text": 256})
    (ws.folder / "pair.json").unlink()
