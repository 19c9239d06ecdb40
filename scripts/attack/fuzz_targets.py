"""Targets of `scripts/attack/fuzz.py`: the bytes to generate, and the functions of the package that read them."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from hypothesis import strategies as st
from PIL import Image

import input_pipeline
from dcvit.config import load as configs
from dcvit.config import values
from dcvit.hub.model import open_trained
from dcvit.runs import checksums, identity, metrics, steps, workdir
from dcvit.training.setup import make_setup
from input_pipeline.images import decode
from input_pipeline.preprocess import ops
from input_pipeline.text import tokenizer

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Read = Callable[[bytes, Path], None]

NUMBERS = (0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e308, 1e400, -1e400)
WORDS = (
    "", " ", "\0", "\n", "é", "\ud800", "🎉", "train", "..", "/", "%s", "{}", "1e9", "a" * 300, "(" * 300, "-" * 300,
)  # fmt: skip
SCALARS = st.sampled_from((None, True, False, float("nan"), *NUMBERS, *WORDS)) | st.integers() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3), max_leaves=6
)
EDITS = ("flip", "set", "insert", "delete", "repeat", "truncate")
TINY_VIT = ("model.width=16", "model.depth=1", "model.mlp_dim=16", "model.patch_size=(4,4)", "evals={}")
DATA = {"examples": 9, "class_names": ["a"], "sample": "0"}  # see `identity.data_identity`
TINY_LM = ("model.width=16", "model.depth=1", "model.mlp_dim=16", "model.num_heads=2", "evals={}")


class Target(NamedTuple):
    """A reader of input from outside."""

    inputs: st.SearchStrategy[bytes]
    read: Read  # reads the bytes, with an empty folder for files


@st.composite
def damaged(draw: st.DrawFn, contents: Sequence[bytes]) -> bytes:
    """Bytes of a valid file after a few random edits."""
    data = bytearray(draw(st.sampled_from(contents)))
    for edit in draw(st.lists(st.sampled_from(EDITS), max_size=4)):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(1, 16)))
        if edit == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == "set":
            number = draw(st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"]))
            data[at:end] = number[: end - at]
        elif edit == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif edit == "repeat":
            data[at:at] = data[at:end] * draw(st.sampled_from([1, 2, 1000]))
        elif edit in ("delete", "truncate"):
            del data[at : end if edit == "delete" else None]
    return bytes(data)


@st.composite
def edited(draw: st.DrawFn, documents: Sequence[Json]) -> Json:
    """A JSON document of which a value was replaced, removed or renamed at a random place."""
    document = json.loads(json.dumps(draw(st.sampled_from(documents))))
    for _ in range(draw(st.integers(0, 3))):
        place = document
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
                action = draw(st.sampled_from(("replace", "replace", "remove", "add")))
                if action != "add":
                    del place[key]
                if action != "remove" and isinstance(place, dict):
                    place[key if action == "replace" else draw(st.text(max_size=5))] = draw(VALUES)
                elif action != "remove":
                    place.insert(key, draw(VALUES))
                break
            place = place[key]
    return document


def json_files(documents: Sequence[Json]) -> st.SearchStrategy[bytes]:
    """JSON files with other values, and with damaged bytes."""
    contents = [json.dumps(document).encode() for document in documents]
    return edited(documents).map(lambda document: json.dumps(document).encode()) | damaged(contents)


def json_lines(lines: Sequence[Json]) -> st.SearchStrategy[bytes]:
    """Files of several JSON documents in one line each."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    changed = st.lists(edited(lines) | st.sampled_from(lines), max_size=4)
    return changed.map(lambda found: b"".join(json.dumps(line).encode() + b"\n" for line in found)) | damaged([content])


def text(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    return strategy.map(lambda found: found.encode(errors="surrogatepass"))


def into(name: str, read: Callable[[Path], object]) -> Read:
    """Return a function that writes the bytes to a file and calls `read` with its path."""

    def write(data: bytes, folder: Path) -> None:
        (folder / name).write_bytes(data)
        read(folder / name)

    return write


def pp_strings() -> st.SearchStrategy[bytes]:
    names = sorted(name for name, value in vars(ops).items() if callable(value) and name.islower())
    arguments = st.sampled_from(
        (*map(repr, NUMBERS), "'image'", '"label"', "True", "None", "(8, 8)", "[1]", "{}", "x", "1/0")
    )
    options = st.sampled_from(("size", "precise", "exif", "inkey", "outkey", "method", "num_layers", "x"))
    argument = arguments | st.tuples(options, arguments).map("=".join)
    calls = st.tuples(st.sampled_from(names), st.lists(argument, max_size=3).map(", ".join)).map(
        "{0[0]}({0[1]})".format
    )
    shipped = [
        b"decode|resize(8)|value_range(-1, 1)|onehot(3)|keep('image', 'labels')",
        b"decode_jpeg_and_inception_crop(8)|flip_lr|randaug(2, 10)",
    ]
    return text(st.lists(calls | st.sampled_from(WORDS), max_size=4).map("|".join)) | damaged(shipped)


def read_pp(data: bytes, folder: Path) -> None:
    example = {"image": np.zeros((9, 7, 3), np.uint8), "label": np.int64(1), "tfds_id": b"x"}
    spec, _ = input_pipeline.defer_value_range(data.decode(errors="surrogateescape"))
    input_pipeline.Preprocess(spec)(example, np.random.default_rng(0))


def complete_configs() -> list[Json]:
    return [
        json.loads(configs.load(name, small).to_json())
        for name, small in (("vit_digits", TINY_VIT), ("lm_stdlib", TINY_LM))
    ]


def read_config(path: Path) -> None:
    values.read_json(path)
    open_trained(path.parent)


def image_files() -> list[bytes]:
    """Small images of all formats and modes."""
    pixels = np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3)
    found = []
    for mode, kinds in {
        "RGB": ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"), "L": ("PNG", "JPEG", "BMP"), "P": ("PNG", "GIF"),
        "RGBA": ("PNG", "WEBP"), "CMYK": ("JPEG", "TIFF"), "1": ("PNG", "TIFF"), "I;16": ("PNG",),
    }.items():  # fmt: skip
        image = Image.fromarray(pixels)
        image = Image.fromarray(pixels[:, :, 0].astype(np.uint16)) if mode == "I;16" else image.convert(mode)
        for kind in kinds:
            file = io.BytesIO()
            image.save(file, kind, **({"exif": Image.Exif()} if kind == "JPEG" else {}))
            found.append(file.getvalue())
    return found


def read_image(data: bytes, folder: Path) -> None:
    """Decode with Pillow; TensorFlow's decoder of JPEG takes too long to import."""
    for channels, exif in ((3, False), (1, True)):
        decode.decode(data, channels, precise=True, exif=exif)


def read_text(path: Path) -> None:
    for kind in ("text", "spans"):
        try:
            source = input_pipeline.open_source(kind, path=str(path), context=8)
            source[len(source) - 1]
        except input_pipeline.InputError:
            continue


def tokenizer_files() -> list[Json]:
    """The content of small files tokenizer.json with different models."""
    end = {"id": 3, "content": tokenizer.END_OF_TEXT, "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = ({"decoder": level, "pre_tokenizer": level}, {"normalizer": {"type": "NFKC"}}, {"decoder": None})
    vocab = {"a": 0, "b": 1, "ab": 2}
    models = (
        {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "byte_fallback": False},
        {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
        {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0], ["\u2581a", -2.0]], "unk_id": 0, "byte_fallback": False},
    )
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return [
        {"version": "1.0", **empty, "added_tokens": [end], **part, "model": model}
        for part, model in zip(parts, models, strict=True)
    ]


def read_tokenizer(path: Path) -> None:
    for end_of_text in (tokenizer.END_OF_TEXT, None):
        opened = tokenizer.open_tokenizer(str(path), end_of_text)
        counts = opened.token_bytes
        assert counts is None or len(counts) == opened.vocab_size
        opened.decode([*opened.encode("ab é 🎉 <|endoftext|>"), 0])
        opened.encode_batch(["", "ab"])


def abouts() -> list[Json]:
    return [
        {
            "step": 3, "config": config, "data": DATA, "software": {"jax": "0"}, "devices": {"count": 1},
            "row": {"loss": 0.5}, "metrics_rows": 2, "seconds": 0.5,
        }
        for config in complete_configs()
    ]  # fmt: skip


def read_about(data: bytes, folder: Path) -> None:
    """Read the description of a checkpoint in a workdir, whose checksums are valid."""
    about, path = abouts()[0], folder / "checkpoints" / "3"
    for name, content in {"config.json": about["config"], "data.json": about["data"]}.items():
        (folder / name).write_text(json.dumps(content))
    (path / "about").mkdir(parents=True)
    (path / "about" / "metadata").write_bytes(data)
    checksums.write(path)
    steps.problems(path)
    workdir.check_checkpoint(folder)
    found = steps.about(path)
    identity.check_same_run(path, found, about["config"], about["data"], ["lr"])
    identity.resume_warnings(found, {"software": identity.software(), "devices": about["devices"]})
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 3, "loss": 0.5}\n')
    metrics.JsonLines(folder / "metrics.jsonl", resume_step=found["step"]).missing(found)


def targets() -> dict[str, Target]:
    """Return all targets by name."""
    lines = [
        {"text": "some words", "inputs": "ask", "targets": "say", "meta": {"n": [1]}},
        {"text": "é", "inputs": "", "targets": "x"},
    ]
    return {
        "pp": Target(pp_strings(), read_pp),
        "config.json": Target(json_files(complete_configs()), into("config.json", read_config)),
        "setup": Target(
            json_files(complete_configs()), into("config.json", lambda path: make_setup(values.read_json(path)))
        ),
        "about": Target(json_files(abouts()), read_about),
        "image": Target(damaged(image_files()), read_image),
        "text": Target(json_lines(lines), into("a.jsonl", read_text)),
        "tokenizer.json": Target(json_files(tokenizer_files()), into("tokenizer.json", read_tokenizer)),
    }
