"""What cannot work: one line that says what and why, the documented exit status, and a finished run left as it was.

A table of mistakes that people make, in configs, data, checkpoints and on the command line. Each is given to the
command as a user would; its `--help` and the README document what happens.
"""

import contextlib
import fcntl
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from conftest import TINY

from dcvit.__main__ import dispatch
from dcvit.cli import run

TINY_LM = {
    "tensorboard": False, "ckpt_steps": 1, "total_steps": 2, "model.width": 16, "model.depth": 1,
    "model.num_heads": 2, "model.mlp_dim": 16, "input.batch_size": 8, "evals": {}, "schedule.warmup_percent": 0,
}  # fmt: skip
TINY_VIT = {**TINY, "total_steps": 2, "ckpt_steps": 1, "ema_decay": 0.5}
SEVEN = Path(__file__).parents[1] / "data" / "seven.png"
IDX = struct.Struct("<9sQBQQ")  # the head of a Megatron index: magic, version, dtype, sequences, documents


class Place:
    """A folder of one case: `new` is a workdir that is not there yet, `vit` and `lm` are copies of finished runs."""

    def __init__(self, folder: Path, finished: Path, stack: contextlib.ExitStack):
        self.folder, self.finished, self.stack = folder, finished, stack
        self.new, self.copies = folder / "new", {}

    def copy(self, name: str) -> Path:
        if name not in self.copies:
            self.copies[name] = Path(shutil.copytree(self.finished / name, self.folder / name))
        return self.copies[name]

    @property
    def vit(self) -> Path:
        return self.copy("vit")

    @property
    def lm(self) -> Path:
        return self.copy("lm")

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


class Row(NamedTuple):
    argv: Callable[[Place], list[Any]]  # sets the case up and returns the command line
    message: str  # a piece of the line
    status: int = 2
    notice: str = ""  # a line that precedes it: what takes long, or what was left out
    begins: bool = False  # what is wrong can be seen only on the way


def words(options: dict[str, Any], at: Place | None = None) -> list[str]:
    """Options as overrides; one that is a function is called with the place."""
    return [f"--config.{key}={value(at) if callable(value) else value}" for key, value in options.items()]


def vit(**options: Any) -> Callable[[Place], list[Any]]:
    """A new training of images; in names, two underscores stand for a dot."""
    dotted = {key.replace("__", "."): value for key, value in options.items()}
    return lambda at: ["train", "--config", "vit_digits", "--workdir", at.new, *words({**TINY, **dotted})]


def text(data: Callable[[Place], dict[str, Any]], **options: Any) -> Callable[[Place], list[Any]]:
    """A new training of a language model on some data."""
    dotted = {key.replace("__", "."): value for key, value in options.items()}

    def argv(at: Place) -> list[Any]:
        given = {**TINY_LM, "input.data": data(at), **dotted}
        return ["train", "--config", "lm_stdlib", "--workdir", at.new, *words(given, at)]

    return argv


def file(source: str | bytes, arguments: str = "") -> Callable[[Place], list[Any]]:
    """A new training with a config file of this content."""
    return lambda at: ["train", "--config", f"{at.write('mine.py', source)}{arguments}", "--workdir", at.new]


def get_config(body: str) -> str:
    """A config file: the digits' config, and something done to it."""
    return f"from dcvit import config as c\ndef get_config():\n    config = c.load('vit_digits').unlock()\n    {body}\n"


def resume(*more: Any, **options: Any) -> Callable[[Place], list[Any]]:
    """The finished training of images, again, with something changed."""
    dotted = {key.replace("__", "."): value for key, value in options.items()}
    return lambda at: ["train", "--config", "vit_digits", "--workdir", at.vit, *words({**TINY_VIT, **dotted}), *more]


def after(prepare: Callable[[Place], Any], command: Callable[[Place], list[Any]]) -> Callable[[Place], list[Any]]:
    """A command, once something was done to the place."""

    def argv(at: Place) -> list[Any]:
        prepare(at)
        return command(at)

    return argv


def evaluate(*more: Any) -> Callable[[Place], list[Any]]:
    return lambda at: ["evaluate", "--workdir", at.vit, *more]


def command(*argv: Any) -> Callable[[Place], list[Any]]:
    """A command line; a function in it is called with the place."""
    return lambda at: [word(at) if callable(word) else word for word in argv]


def damage(step: int, item: str) -> Callable[[Place], Any]:
    """Changes one byte in the middle of the largest file of an item of a checkpoint."""

    def change(at: Place) -> None:
        folder = at.vit / "checkpoints" / str(step) / item
        path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p.name))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return change


def overwrite(name: str, content: str | bytes) -> Callable[[Place], Any]:
    """Replaces a file of the finished training of images."""
    return lambda at: at.write(f"vit/{name}", content) if at.vit else None


def middle_line(name: str) -> Callable[[Place], Any]:
    """Damages the second of several lines."""

    def change(at: Place) -> None:
        path = at.vit / name
        lines = path.read_bytes().split(b"\n")
        lines[1] = lines[1][: len(lines[1]) // 2]
        path.write_bytes(b"\n".join(lines))

    return change


def remove(name: str) -> Callable[[Place], Any]:
    def change(at: Place) -> None:
        path = at.vit / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def lock(at: Place) -> None:
    """Another run has the workdir."""
    opened = at.stack.enter_context((at.vit / ".lock").open("w"))
    opened.write("process 1 on elsewhere, since yesterday\n")
    opened.flush()
    fcntl.flock(opened, fcntl.LOCK_EX)


class Evil:
    """What a pickle could do."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def npz(kind: str) -> Callable[[Place], Path]:
    """An .npz file that is none, or not of the model."""

    def write(at: Place) -> Path:
        path = at.folder / "weights.npz"
        if kind == "pickle":
            path.write_bytes(pickle.dumps({"head/kernel": Evil()}))
        elif kind == "objects":
            np.savez(path, **{"head/kernel": np.array([Evil()], dtype=object)})
        elif kind == "other":
            np.savez(path, **{"body/kernel": np.zeros((3, 3), np.float32)})
        else:
            np.savez(path, **{"head/kernel": np.zeros((64, 10), np.float32)})
            path.write_bytes(path.read_bytes()[:-200])
        return path

    return write


def images(at: Place, name: str, classes: tuple[str, ...] = ("cat", "dog"), count: int = 8) -> Path:
    """A folder of images, train and val."""
    from PIL import Image

    for split in ("train", "val"):
        for label in classes:
            (at.folder / name / split / label).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (8, 8), i).save(at.folder / name / split / label / f"{i}.png")
    return at.folder / name


def folder(prepare: Callable[[Place], Path], **options: Any) -> Callable[[Place], list[Any]]:
    """A new training on a folder of images."""
    dotted = {key.replace("__", "."): value for key, value in options.items()}
    pp = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)|onehot({num_classes})|keep('image', 'labels')"

    def argv(at: Place) -> list[Any]:
        data = {"kind": "folder", "data_dir": str(prepare(at)), "split": "train"}
        evaluation = {"type": "classification", "data": {**data, "split": "val"}, "pp": pp}
        given = {**TINY, "input.data": data, "input.pp": pp, "input.batch_size": 8, "num_classes": None}
        del given["evals.test.log_steps"]
        given |= {"evals": {"val": evaluation}, **dotted}
        return ["train", "--config", "vit_digits", "--workdir", at.new, *words(given, at)]

    return argv


def tokens(at: Place, change: Callable[[Path], Any] | None = None, most: int = 200) -> Path:
    """A .bin/.idx pair of 500 tokens, of which the .idx may be changed."""
    from input_pipeline.text.megatron import Writer

    prefix = at.folder / "pair"
    with Writer(str(prefix), 257, 256) as writer:
        writer.add(np.arange(500) % most)
    prefix.with_suffix(".json").unlink()
    if change:
        change(prefix.with_suffix(".idx"))
    return prefix


def pair(change: Callable[[Path], Any] | None = None, **options: Any) -> Callable[[Place], dict[str, Any]]:
    given = {"kind": "megatron", "context": 16, "vocab_size": 257, **options}
    return lambda at: {**given, "path": str(tokens(at, change))}


def written(name: str, content: str | bytes, **options: Any) -> Callable[[Place], dict[str, Any]]:
    """A file of text, as data."""
    given = {"kind": "text", "context": 16, **options}
    return lambda at: {**given, "path": str(at.write(name, content))}


def patch(at: int, content: bytes) -> Callable[[Path], Any]:
    """Replaces bytes of a file."""

    def change(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[at : at + len(content)] = content
        path.write_bytes(whole)

    return change


LM_WORKDIR = ("--workdir", lambda at: at.lm)
VIT_WORKDIR = ("--workdir", lambda at: at.vit)
PROMPT = ("--prompt", "def")
GENERATE = ("generate", *LM_WORKDIR, *PROMPT)
BAD_UTF8 = b"good line\nbad \xff\xfe line\n" * 20
LINES = "".join(json.dumps({"text": f"line {i} of several"}) + "\n" for i in range(40))
SPAN = json.dumps({"inputs": "a", "targets": ""}) + "\n"

CONFIG = {
    "config that is not there": Row(
        command("train", "--config", "no/such.py", "--workdir", lambda at: at.new), "no config file no/such.py"
    ),
    "config that is a folder": Row(lambda at: ["train", "--config", at.folder, "--workdir", at.new], "no config file"),
    "bare name misspelt": Row(
        command("train", "--config", "vit_digit", "--workdir", lambda at: at.new), "did you mean 'vit_digits'?"
    ),
    "empty name": Row(command("train", "--config", "", "--workdir", lambda at: at.new), "no config named ''"),
    "syntax error": Row(file("def get_config(:\n"), "mine.py: SyntaxError"),
    "not UTF-8": Row(file(b"name = '\xff\xfe'\n"), "mine.py: SyntaxError"),
    "NUL bytes": Row(file(b"\0\0\0"), "mine.py: SyntaxError"),
    "no get_config": Row(file("config = {}\n"), "has no attribute 'get_config'"),
    "get_config that is no function": Row(file("get_config = 3\n"), "mine.py: TypeError"),
    "get_config raises": Row(
        file("def get_config():\n    raise ValueError('one\\ntwo')\n"), "mine.py: ValueError: one"
    ),
    "get_config returns a dict": Row(
        file("def get_config():\n    return {}\n"), "returned a dict, expected a ConfigDict"
    ),
    "get_config returns nothing": Row(
        file("def get_config():\n    pass\n"), "returned a NoneType, expected a ConfigDict"
    ),
    "sys.exit in the file": Row(file("import sys\nsys.exit(0)\n"), "mine.py: SystemExit: 0"),
    "sys.exit in get_config": Row(
        file("def get_config():\n    import sys\n    sys.exit('bye')\n"), "mine.py: SystemExit: bye"
    ),
    "endless recursion": Row(file("def get_config():\n    return get_config()\n"), "mine.py: RecursionError"),
    "missing library": Row(file("import no_such_library\n"), "No module named 'no_such_library'"),
    "argument that it needs": Row(
        file("def get_config(size): pass\n"), "missing 1 required positional argument: 'size'"
    ),
    "argument unknown": Row(
        command("train", "--config", "vit_digits:atention=mha", "--workdir", lambda at: at.new),
        "did you mean 'attention'?",
    ),
    "argument of another type": Row(
        command("train", "--config", "vit_digits:epochs=x", "--workdir", lambda at: at.new),
        "argument epochs=x should be of type int",
    ),
    "argument without value": Row(
        command("train", "--config", "vit_digits:epochs", "--workdir", lambda at: at.new), "not of the form key=value"
    ),
    "top-level key unknown": Row(
        file(get_config("config.lrr = 1.0; return config")), "unknown key 'config.lrr'; did you mean 'lr'?"
    ),
    "key of the model unknown": Row(
        file(get_config("config.model.widht = 8; return config")),
        "config.model has no option 'widht'; did you mean 'width'?",
    ),
    "key of the input unknown": Row(vit(input__batchsize=8), "did you mean 'batch_size'?"),
    "key of an evaluator unknown": Row(vit(evals__test__batchsize=8), "did you mean 'batch_size'?"),
    "key of its data unknown": Row(vit(evals__test__data__spilt="x"), "did you mean 'split'?"),
    "two totals": Row(
        file(get_config("config.total_steps = 3; return config")),
        "config.total_steps, config.total_epochs: give exactly one of them",
    ),
    "two warm-ups": Row(
        file(get_config("config.schedule.warmup_steps = 3; return config")), "give exactly one of them"
    ),
    "two intervals": Row(
        file(get_config("config.log_epochs = 3; return config")),
        "config.log_steps, config.log_epochs: give exactly one of them",
    ),
    "two intervals of an evaluator": Row(
        file(get_config("config.evals.test.log_steps = 3; return config")),
        "config.evals.test.log_steps, config.evals.test.log_epochs: give exactly one",
    ),
    "a total of itself": Row(
        file(get_config("del config.total_epochs; config.total_percent = 5; return config")),
        "cannot be a percentage of itself",
    ),
    "no total": Row(
        file(get_config("del config.total_epochs; return config")), "give total_epochs, total_steps or total_examples"
    ),
    "negative total": Row(vit(total_steps=-5), "should be a number, 0 or more"),
    "total in words": Row(
        file(get_config("config.total_epochs = None; config.total_steps = 'many'; return config")),
        "config.total_steps='many' should be a number",
    ),
    "no data": Row(file(get_config("del config.input['data']; return config")), "config.input.data"),
    "data that is no dict": Row(
        file(get_config("config.input = {**config.input, 'data': 3}; return config")), "config.input.data"
    ),
    "evaluator that is no dict": Row(
        file(get_config("config.evals = {'test': 3}; return config")), "config.evals.test=3 should be a dict"
    ),
    "evaluator without preprocessing": Row(
        file(get_config("del config.evals.test['pp']; return config")), "missing a required"
    ),
    "seed of a fraction": Row(vit(seed=1.5), "config.seed=1.5 should be of type int"),
    "learning rate in words": Row(vit(lr="fast"), "config.lr=fast should be of type float"),
    "learning rate below 0": Row(vit(lr=-0.1), "config.lr=-0.1 should be finite and not negative"),
    "infinite learning rate": Row(vit(lr="1e999"), "config.lr=inf should be finite"),
    "averaging for ever": Row(vit(ema_decay=1.0), "config.ema_decay=1.0 should be in [0, 1)"),
    "all label smoothing": Row(vit(label_smoothing=1.0), "config.label_smoothing=1.0 should be in [0, 1)"),
    "clipping to nothing": Row(vit(grad_clip_norm=0.0), "config.grad_clip_norm=0.0 should be finite and above 0"),
    "batch size in words": Row(vit(input__batch_size="'64'"), "config.input.batch_size"),
    "batch of nothing": Row(vit(input__batch_size=0), "config.input.batch_size=0 should be 1 or more"),
    "trace of steps that there are not": Row(vit(profile="(9,10)"), "config.profile=(9, 10): the run has"),
    "a dict that is a number": Row(vit(model=3), "config.model=3 should be of type ConfigDict, not int"),
    "an optimiser's argument in words": Row(vit(optax__b1="much"), "b1"),
    "schedule that ends in words": Row(vit(schedule__end="low"), "end='low' should be of type float"),
    "warm-up below 0": Row(
        vit(schedule__warmup_percent=-1), "config.schedule.warmup_percent=-1 should be a number, 0 or more"
    ),
    "warm-up longer than the run": Row(vit(schedule__warmup_steps=100), "do not fit into 6 steps"),
    "keeping every minus first checkpoint": Row(
        vit(keep_ckpt_steps=-1), "config.keep_ckpt_steps=-1 should be a number"
    ),
    "profile backwards": Row(vit(profile=(5, 2)), "(first step, last step)"),
    "mesh of other devices": Row(vit(mesh=[("data", 3)]), "on 8 devices, which is not 3"),
    "strategy without its axis": Row(vit(sharding_strategy="fsdp"), "config.mesh names no axis 'fsdp'"),
    "width of nothing": Row(vit(model__width=0), "width=0 should be 1 or more"),
    "layers below 0": Row(vit(model__depth=-1), "depth=-1 should not be negative"),
    "heads that do not divide": Row(vit(model__num_heads=3), "num_heads=3 does not divide width=16"),
    "patch of three numbers": Row(vit(model__patch_size=(4, 4, 4)), "patch_size=(4, 4, 4)"),
    "best of nothing": Row(
        vit(ckpt_best=("tset/top1", "max")), "no evaluation yields 'tset/top1'; did you mean 'test/top1'?"
    ),
    "mixup of text": Row(text(written("a.txt", "some text " * 50), mixup=0.2), "config.mixup=0.2 is for images"),
    "z-loss of images": Row(vit(z_loss=0.1), "config.z_loss=0.1 is for language models"),
}

DATA = {
    "no folder": Row(folder(lambda at: at.folder / "nowhere"), "no folder"),
    "empty folder": Row(folder(lambda at: at.write("pets/train/.keep", "").parent.parent), "holds no class folders"),
    "folder without images": Row(
        folder(lambda at: at.write("pets/train/cat/notes.md", "").parents[2]), "holds no images"
    ),
    "image that is none": Row(
        folder(lambda at: at.write(f"{images(at, 'pets').name}/train/cat/0.png", "no image").parents[2]), "0.png"
    ),
    "empty image": Row(
        folder(lambda at: at.write(f"{images(at, 'pets').name}/train/cat/0.png", "").parents[2]), "0.png"
    ),
    "evaluation of other classes": Row(
        folder(lambda at: images(at, "pets"), evals=lambda at: other_classes(at)),
        "has other classes than the training data",
    ),
    "class that training lacks": Row(
        folder(lambda at: at.write(f"{images(at, 'pets').name}/val/bird/0.png", "x").parents[2]), "class 'bird' of"
    ),
    "fewer images than a batch": Row(
        folder(lambda at: images(at, "pets", count=1)), "2 examples do not fill one batch of 8"
    ),
    "unknown split": Row(vit(input__data__split="trian"), "digits has no split 'trian'; did you mean 'train'?"),
    "limit of 0": Row(vit(input__data__limit=0), "limit=0 should be 1 or more"),
    "limit below 0": Row(vit(evals__test__data__limit=-3), "limit=-3 should be 1 or more"),
    "unknown kind": Row(vit(input__data__kind="digit"), "did you mean 'digits'?"),
    "labels beyond the classes": Row(vit(input__pp="value_range(-1, 1)|onehot(5)|keep('image', 'labels')"), "5"),
    "preprocessing of thousands of ops": Row(vit(input__pp="|".join(["flip_lr"] * 5000)), "preprocessing"),
    "preprocessing that does not parse": Row(vit(input__pp="value_range(-1, 1"), "cannot parse"),
    "text that is not there": Row(
        text(lambda at: {"kind": "text", "path": str(at.folder / "none.txt"), "context": 16}), "none.txt"
    ),
    "text in an empty folder": Row(
        text(lambda at: {"kind": "text", "path": str(at.write("texts/.keep", "").parent), "context": 16}), "no files at"
    ),
    "text of another kind": Row(text(written("a.pdf", "%PDF")), "expected a name ending in .txt"),
    "text that is no UTF-8": Row(text(written("a.txt", BAD_UTF8)), "a.txt:2: not UTF-8: invalid start byte at byte 5"),
    "empty text": Row(text(written("a.txt", "")), "holds no text"),
    "text shorter than a batch": Row(text(written("a.txt", "short")), "1 examples do not fill one batch of 8"),
    "line that is no JSON": Row(text(written("a.jsonl", LINES + "{'text': 1}\n")), "a.jsonl:41: not JSON"),
    "line without its key": Row(
        text(written("a.jsonl", LINES + '{"txt": "x"}\n')), "a.jsonl:41: no key 'text'; did you mean 'txt'?"
    ),
    "validation of nothing": Row(
        text(written("a.txt", "text " * 99, split="validation")), "without a validation_fraction above 0"
    ),
    "context of 0": Row(text(written("a.txt", "text " * 99, context=0)), "context"),
    "tokenizer that is not there": Row(
        text(written("a.txt", "text " * 99, tokenizer="/no/tokenizer.json")), "no tokenizer /no/tokenizer.json"
    ),
    "tokenizer that is none": Row(
        text(lambda at: {**written("a.txt", "text " * 99)(at), "tokenizer": str(at.write("tokenizer.json", "{}"))}),
        "is no tokenizer.json",
    ),
    "targets of nothing": Row(text(written("a.jsonl", SPAN, kind="spans")), "a.jsonl:1: 'targets' is empty"),
    "tokens without .idx": Row(text(pair(lambda idx: idx.unlink())), "pair"),
    "tokens without .bin": Row(text(pair(lambda idx: idx.with_suffix(".bin").unlink())), "pair"),
    "index of another kind": Row(text(pair(patch(0, b"NOTMEGA"))), "is no index of Megatron's"),
    "index of another version": Row(text(pair(patch(9, b"\7"))), "version 7, expected 1"),
    "index of floats": Row(text(pair(patch(17, b"\6"))), "dtype code 6 (floats)"),
    "index cut off": Row(text(pair(lambda idx: idx.write_bytes(idx.read_bytes()[:-5]))), "cut off or damaged"),
    "index of nothing": Row(text(pair(lambda idx: idx.write_bytes(b""))), "is no index of Megatron's"),
    "index that tells of more tokens": Row(text(pair(patch(IDX.size, struct.pack("<i", 9999)))), "pair"),
    "tokens beyond the vocabulary": Row(
        text(pair(vocab_size=10)), "pair.bin, row 0: token 10 is not in the vocabulary of 10"
    ),
    "tokens beyond the vocabulary, further on": Row(text(pair(vocab_size=190)), "token 19", begins=True),
    "tokens beyond the model": Row(text(pair(vocab_size=300)), "has 300 tokens, config.vocab_size=257"),
    "tokens of no known vocabulary": Row(text(pair(vocab_size=None)), "give config.input.data.vocab_size"),
    "records that are not there": Row(
        text(lambda at: {"kind": "input_ids", "path": str(at.folder), "context": 16, "vocab_size": 257}), "no files at"
    ),
    "records that are damaged": Row(
        text(
            lambda at: {
                "kind": "input_ids",
                "path": str(at.write("a.tfrecord", b"\1" * 40)),
                "context": 16,
                "vocab_size": 257,
            }
        ),
        "a.tfrecord is damaged or cut off in record 0",
        notice="finding where the records",
    ),
    "evaluation that ends otherwise": Row(
        text(written("a.txt", "text " * 99), evals=lambda at: other_end(at)),
        "ends documents with token 3, the training data with 256",
    ),
    "images for a language model": Row(text(lambda at: {"kind": "digits"}), "holds no text"),
    "text for an image model": Row(vit(input__data={"kind": "stdlib", "context": 16}), "preprocessing needs 'image'"),
}


def other_classes(at: Place) -> dict[str, Any]:
    pp = "decode(1, precise=True)|resize_pillow(8)|value_range(-1, 1)|onehot(2)|keep('image', 'labels')"
    data = {"kind": "folder", "data_dir": str(images(at, "others", ("cat", "fox"))), "split": "val"}
    return {"val": {"type": "classification", "data": data, "pp": pp}}


def other_end(at: Place) -> dict[str, Any]:
    data = {"kind": "megatron", "path": str(tokens(at)), "context": 16, "vocab_size": 257, "end_of_text": 3}
    return {"validation": {"type": "perplexity", "data": data}}


CHECKPOINTS = {
    **{
        f"resuming with a damaged {item}": Row(after(damage(2, item), resume()), f"checkpoints/2 is damaged: {item}/")
        for item in ("params", "ema", "rest", "about")
    },
    "evaluating damaged weights": Row(after(damage(2, "ema"), evaluate()), "intact is --checkpoint"),
    "predicting with damaged weights": Row(
        after(damage(2, "ema"), command("predict", *VIT_WORKDIR, SEVEN)), "is not what was saved"
    ),
    "starting from damaged weights": Row(
        after(damage(2, "ema"), lambda at: vit(model_init=at.vit)(at)), "is not what was saved"
    ),
    "fewer steps than are done": Row(
        resume("--accept", "total_steps", total_steps=1), "is at step 2, beyond the 1 steps of this config"
    ),
    "seal that is missing": Row(after(remove("checkpoints/2/SHA256SUMS"), resume()), "SHA256SUMS"),
    "seal that is missing, evaluated": Row(after(remove("checkpoints/2/SHA256SUMS"), evaluate()), "SHA256SUMS"),
    "seal that is damaged": Row(
        after(overwrite("checkpoints/2/SHA256SUMS", "nonsense\n"), resume()), "SHA256SUMS line 1 is damaged"
    ),
    "seal cut short": Row(after(overwrite("checkpoints/2/SHA256SUMS", ""), evaluate()), "SHA256SUMS is cut short"),
    "item that is missing": Row(after(remove("checkpoints/2/rest"), resume()), "is missing"),
    "weights that are missing": Row(after(remove("checkpoints/2/ema"), evaluate()), "is missing"),
    "file that does not belong": Row(
        after(overwrite("checkpoints/2/params/mine.txt", "x"), resume()), "params/mine.txt does not belong there"
    ),
    "no workdir": Row(command("evaluate", "--workdir", "no/such/run"), "no workdir no/such/run"),
    "workdir without a run": Row(lambda at: ["evaluate", "--workdir", at.folder], "config.json"),
    "run without a checkpoint": Row(after(remove("checkpoints"), evaluate()), "no checkpoint in"),
    "no checkpoint there": Row(evaluate("--checkpoint", "no/such/checkpoint"), "no checkpoint in no/such/checkpoint"),
    "checkpoint of another model": Row(
        lambda at: ["evaluate", "--workdir", at.vit, "--checkpoint", at.lm], "does not fit the model"
    ),
    "weights of another model": Row(lambda at: vit(model_init=at.lm)(at), "does not fit the model"),
    "prediction with text's model": Row(command("predict", *LM_WORKDIR, SEVEN), "config.pp_predict is empty"),
    "generation with images' model": Row(command("generate", *VIT_WORKDIR, *PROMPT), "this needs a language model"),
    **{
        f".npz that is {what}": Row(lambda at, kind=kind: vit(model_init=npz(kind)(at))(at), message)
        for what, kind, message in (
            ("a pickle", "pickle", "weights.npz"),
            ("of Python objects", "objects", "weights.npz"),
            ("cut off", "cut", "weights.npz"),
            ("of another model", "other", "body/kernel"),
        )
    },
    "evaluating an .npz that is a pickle": Row(
        lambda at: ["evaluate", "--workdir", at.vit, "--checkpoint", npz("pickle")(at)], "weights.npz"
    ),
    "config.json that is no JSON": Row(after(overwrite("config.json", "{"), evaluate()), "config.json"),
    "config.json that is a list": Row(after(overwrite("config.json", "[1]"), evaluate()), "JSON object"),
    "config.json cut off, resumed": Row(after(overwrite("config.json", '{"seed": '), resume()), "config.json"),
    "config.json that is no UTF-8": Row(after(overwrite("config.json", b"\xff\xfe"), resume()), "config.json"),
    "config.json that is gone, another model": Row(after(remove("config.json"), resume(model__width=32)), "/vit"),
    "metrics damaged in the middle": Row(after(middle_line("metrics.jsonl"), resume()), "metrics.jsonl:2 is damaged"),
    "metrics damaged, with another interval": Row(
        after(middle_line("metrics.jsonl"), resume(log_steps=1)), "metrics.jsonl:2 is damaged"
    ),
    "metrics that are no UTF-8": Row(
        after(overwrite("metrics.jsonl", b"\xff\xfe\n" * 3), resume()), "metrics.jsonl:1 is damaged"
    ),
    "timing damaged in the middle": Row(
        after(overwrite("timing.jsonl", b"{}\n{\n{}\n"), resume()), "timing.jsonl:1 is damaged"
    ),
    "metrics damaged, plotted": Row(
        after(middle_line("metrics.jsonl"), lambda at: ["plot", at.vit, "--out", at.folder / "c.png"]),
        "metrics.jsonl:2 is damaged",
    ),
    "data.json that is no JSON": Row(after(overwrite("data.json", "{"), resume()), "cannot read"),
    "data.json that is a number": Row(after(overwrite("data.json", "3"), resume()), "JSON object"),
    "data.json damaged, predicted": Row(
        after(overwrite("data.json", "{"), command("predict", *VIT_WORKDIR, SEVEN)), "data.json"
    ),
    "data.json of other classes": Row(
        after(
            overwrite("data.json", '{"class_names": ["a", "b"]}'),
            command("predict", *VIT_WORKDIR, SEVEN),
        ),
        "names 2 classes, the config has 10",
    ),
    "another seed": Row(resume(seed=1), "config.seed (there 0, here 1). To go on knowingly: --accept seed"),
    "another batch size": Row(
        resume(input__batch_size=32),
        "config.input.batch_size (there 64, here 32). To go on knowingly: --accept input.batch_size",
    ),
    "other data": Row(resume(input__data__limit=100), "--accept data.examples"),
    "another model": Row(
        resume(model__width=32), "config.model.width (there 16, here 32). To go on knowingly: --accept model.width"
    ),
    "another optimiser": Row(resume(optax_name="scale_by_lion"), "--accept optax_name"),
    "another length": Row(
        resume(total_steps=4), "config.total_steps (there 2, here 4). To go on knowingly: --accept total_steps"
    ),
    "several changes": Row(resume(seed=1, lr=0.5), "--accept lr --accept seed"),
    "one change of two accepted": Row(
        resume("--accept", "lr", seed=1, lr=0.5), "config.seed (there 0, here 1). To go on knowingly: --accept seed"
    ),
    "another model, accepted": Row(resume("--accept", "model.width", model__width=32), "does not fit the model"),
    "another optimiser, accepted": Row(
        resume("--accept", "optax_name", "--accept", "optax", optax_name="scale_by_lion"), "does not fit the model"
    ),
    "accepting an unknown key": Row(resume("--accept", "lrr"), "--accept lrr; did you mean 'lr'?"),
    "accepting nothing": Row(resume("--accept"), "--accept: expected one argument"),
    "a workdir in use": Row(after(lock, resume()), "is in use by process 1 on elsewhere, since yesterday"),
    "a workdir that is a file": Row(
        lambda at: ["train", "--config", "vit_digits", "--workdir", at.write("file", ""), *words(TINY)],
        "cannot write to workdir",
    ),
    "a workdir below a file": Row(
        lambda at: ["train", "--config", "vit_digits", "--workdir", at.write("file", "") / "run", *words(TINY)],
        "cannot write to workdir",
    ),
    "a workdir where nobody may write": Row(
        command("train", "--config", "vit_digits", "--workdir", "/proc/run", *words(TINY)),
        "cannot write to workdir /proc/run",
    ),
}

COMMAND_LINE = {
    "unknown command": Row(command("trian"), "unknown command 'trian'; did you mean 'train'?"),
    "train: nothing": Row(command("train"), "required: --config, --workdir"),
    "train: no workdir": Row(command("train", "--config", "vit_digits"), "required: --workdir"),
    "train: misspelt option": Row(
        command("train", "--config", "vit_digits", "--wrokdir", "w"),
        "unknown option --wrokdir; did you mean '--workdir'?",
    ),
    "train: misspelt override": Row(
        command("train", "--config", "vit_digits", "--workdir", "w", "--confg.lr=1"), "unknown option --confg.lr"
    ),
    "train: a word too many": Row(
        command("train", "--config", "vit_digits", "--workdir", "w", "more"), "unknown option more"
    ),
    "train: empty workdir": Row(
        command("train", "--config", "vit_digits", "--workdir", ""), "--workdir: an empty path"
    ),
    "train: workdir in a store that nothing here serves": Row(
        command("train", "--config", "vit_digits", "--workdir", "s3://bucket/w"), "s3://bucket/w"
    ),
    "evaluate: workdir in an unknown store": Row(command("evaluate", "--workdir", "zzz://bucket/w"), "zzz://bucket/w"),
    "train: workdir in an unknown store": Row(
        command("train", "--config", "vit_digits", "--workdir", "zzz://bucket/w"), "zzz://bucket/w"
    ),
    "train: override without value": Row(
        command("train", "--config", "vit_digits", "--workdir", lambda at: at.new, "--config.lr"),
        "expected --config.KEY=VALUE",
    ),
    "train: half a cluster": Row(
        command("train", "--config", "vit_digits", "--workdir", lambda at: at.new, "--num_processes", 2),
        "missing --coordinator, --process_id",
    ),
    "evaluate: nothing": Row(
        command("evaluate"), "give --workdir DIR, or both --config CONFIG and --checkpoint CHECKPOINT"
    ),
    "evaluate: override without config": Row(evaluate("--config.seed=1"), "--config.KEY=VALUE needs --config"),
    "evaluate: unknown format": Row(evaluate("--format", "xml"), "argument --format: invalid choice: 'xml'"),
    "evaluate: misspelt option": Row(evaluate("--chekpoint", "x"), "did you mean '--checkpoint'?"),
    "evaluate: table in no folder": Row(evaluate("--out", "no/such/table.csv"), "no/such/table.csv"),
    "evaluate: table of other columns": Row(
        lambda at: evaluate("--out", at.write("t.csv", "a,b\n1,2\n"))(at), "has other columns, a,b"
    ),
    "predict: no images": Row(command("predict", *VIT_WORKDIR), "no image files"),
    "predict: folder without images": Row(
        command("predict", *VIT_WORKDIR, lambda at: at.write("empty/a.md", "").parent), "no image files"
    ),
    "predict: image that is not there": Row(
        command("predict", *VIT_WORKDIR, "no/such.png"), "error: no/such.png: No such file", 1
    ),
    "predict: image that is none": Row(
        command("predict", *VIT_WORKDIR, lambda at: at.write("a.png", "no image")), "a.png", 1
    ),
    "predict: image cut off": Row(
        command("predict", *VIT_WORKDIR, lambda at: at.write("a.png", SEVEN.read_bytes()[:60])),
        "a.png",
        1,
    ),
    "predict: no classes to show": Row(
        command("predict", *VIT_WORKDIR, SEVEN, "--topk", 0), "--topk 0: show at least one class"
    ),
    "predict: classes in words": Row(
        command("predict", *VIT_WORKDIR, SEVEN, "--topk", "all"), "--topk: invalid int value: 'all'"
    ),
    "predict: empty path": Row(command("predict", *VIT_WORKDIR, ""), "an empty path"),
    "predict: misspelt option": Row(command("predict", *VIT_WORKDIR, SEVEN, "--top", 3), "did you mean '--topk'?"),
    "generate: no prompt": Row(command("generate", *LM_WORKDIR), "give --prompt TEXT or --prompt_file FILE"),
    "generate: tokens below 0": Row(command(*GENERATE, "--tokens", -5), "--tokens"),
    "generate: no tokens": Row(command(*GENERATE, "--tokens", 0), "--tokens"),
    "generate: more tokens than the context": Row(command(*GENERATE, "--tokens", 9999), "context"),
    "generate: prompt longer than the context": Row(
        command("generate", *LM_WORKDIR, "--prompt", "long " * 99), "context"
    ),
    "generate: temperature below 0": Row(command(*GENERATE, "--temperature", -1), "temperature"),
    "generate: temperature that is no number": Row(command(*GENERATE, "--temperature", "nan"), "temperature"),
    "generate: temperature in words": Row(
        command(*GENERATE, "--temperature", "hot"), "--temperature: invalid float value: 'hot'"
    ),
    "generate: top_p of 0": Row(command(*GENERATE, "--top_p", 0), "top_p"),
    "generate: top_p above 1": Row(command(*GENERATE, "--top_p", 1.5), "top_p"),
    "generate: top_k below 0": Row(command(*GENERATE, "--top_k", -1), "top_k"),
    "generate: seed below 0": Row(command(*GENERATE, "--seed", -1, "--tokens", 1), "seed"),
    "generate: seed too large": Row(command(*GENERATE, "--seed", 2**70, "--tokens", 1), "seed"),
    "generate: stop at nothing": Row(command(*GENERATE, "--stop", ""), "--stop: an empty text"),
    "generate: prompt file that is not there": Row(
        command("generate", *LM_WORKDIR, "--prompt_file", "no/such.txt"), "cannot read no/such.txt"
    ),
    "generate: prompt file that is no UTF-8": Row(
        command("generate", *LM_WORKDIR, "--prompt_file", lambda at: at.write("p.txt", BAD_UTF8)), "p.txt is not UTF-8"
    ),
    "generate: unknown format": Row(command(*GENERATE, "--format", "csv"), "argument --format: invalid choice: 'csv'"),
    "generate: tokenizer that is not there": Row(command(*GENERATE, "--tokenizer", "no.json"), "no tokenizer no.json"),
    "plot: nothing": Row(command("plot"), "required: workdirs"),
    "plot: no workdir": Row(command("plot", "no/such/run"), "no/such/run"),
    "plot: workdir without metrics": Row(
        lambda at: ["plot", at.folder, "--out", at.folder / "c.png"], "no metrics.jsonl with rows"
    ),
    "plot: picture of another kind": Row(
        lambda at: ["plot", at.vit, "--out", "curves.doc"], "expected a name ending in .png"
    ),
    "plot: picture in no folder": Row(lambda at: ["plot", at.vit, "--out", at.folder / "no/such/c.png"], "no/such"),
    "plot: an override": Row(lambda at: ["plot", at.vit, "--config.lr=1"], "plot takes no --config.lr=1"),
    "tokenize: nothing": Row(command("tokenize"), "required: --data, --out"),
    "tokenize: no data": Row(
        lambda at: ["tokenize", "--data", at.folder / "none", "--out", at.folder / "o"], "no files at"
    ),
    "tokenize: empty path": Row(lambda at: ["tokenize", "--data", "", "--out", at.folder / "o"], "an empty path"),
    "tokenize: no UTF-8": Row(
        lambda at: ["tokenize", "--data", at.write("a.txt", BAD_UTF8), "--out", at.folder / "o"], "a.txt:2: not UTF-8"
    ),
    "tokenize: no such key": Row(
        lambda at: ["tokenize", "--data", at.write("a.jsonl", LINES), "--key", "body", "--out", at.folder / "o"],
        "no key 'body'",
    ),
    "tokenize: file that is there": Row(
        lambda at: ["tokenize", "--data", at.write("a.txt", "x"), "--out", at.write("o.bin", "").with_suffix("")],
        "o.bin is there already",
    ),
    "tokenize: place below a file": Row(
        lambda at: ["tokenize", "--data", at.write("a.txt", "x"), "--out", at.write("f", "") / "o"], "cannot write"
    ),
    "tokenize: no tokenizer": Row(
        lambda at: ["tokenize", "--data", at.write("a.txt", "x"), "--tokenizer", "no.json", "--out", at.folder / "o"],
        "no tokenizer no.json",
    ),
    "tokenize: misspelt option": Row(
        lambda at: ["tokenize", "--data", at.write("a.txt", "x"), "--out", at.folder / "o", "--keys", "text"],
        "did you mean '--key'?",
    ),
}

TABLE = CONFIG | DATA | CHECKPOINTS | COMMAND_LINE


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with two finished runs: `vit` of the digits, and `lm` of a few lines."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text("def main():\n    return 0\n" * 40)
    data = {"kind": "text", "path": str(folder / "text.txt"), "context": 16}
    runs = {"vit": ("vit_digits", TINY_VIT), "lm": ("lm_stdlib", {**TINY_LM, "input.data": data})}
    with jax.numpy_dtype_promotion("standard"):
        for name, (config, options) in runs.items():
            argv = ["train", "--config", config, "--workdir", str(folder / name), *words(options)]
            assert run(dispatch, argv) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_there_are_enough_of_all_kinds():
    assert min(map(len, (CONFIG, DATA, CHECKPOINTS, COMMAND_LINE))) >= 10
    assert len(TABLE) == sum(map(len, (CONFIG, DATA, CHECKPOINTS, COMMAND_LINE)))


@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("name", TABLE)
def test_what_cannot_work_is_said_in_one_line_and_changes_nothing(name, finished, tmp_path, capsys):
    row = TABLE[name]
    with contextlib.ExitStack() as stack:
        at = Place(tmp_path, finished, stack)
        argv = [str(word) for word in row.argv(at)]
        before = {copy: contents(copy) for copy in at.copies.values()}
        capsys.readouterr()
        status = run(dispatch, argv)
    out, err = capsys.readouterr()
    assert status == row.status, err
    *notices, line = err.splitlines()
    assert line.startswith("error: "), err
    assert [row.notice in notice for notice in notices] == [True] * bool(row.notice), err
    assert err.endswith("\n")
    assert row.message in line
    assert "Traceback" not in out + err
    assert "unpickled" not in out
    assert at.new.exists() == row.begins
    for copy, content in before.items():
        after_it = contents(copy)
        assert sorted(after_it) == sorted(content)
        assert [name for name in content if after_it[name] != content[name]] == []


def test_a_run_with_metrics_that_were_not_finite_is_plotted(finished, tmp_path):
    """They are null in the file, as `dcvit.runs.metrics` writes them."""
    workdir = Path(shutil.copytree(finished / "vit", tmp_path / "vit"))
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {"loss": None, "test/top1": None}
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(dispatch, ["plot", str(workdir), "--out", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").exists()
