"""Bad data: missing, empty, damaged or of another kind than the model needs."""

import json
import struct

from workspace import (
    bad,
    image_evaluator,
    image_folder,
    images,
    json_lines,
    patch,
    text,
    text_file,
    token_file,
    tokens,
    vit,
    with_file,
)

INDEX_HEADER = struct.Struct("<9sQBQQ")  # of a Megatron .idx: magic, version, dtype, sequences, documents
NOT_UTF8 = b"good line\nbad \xff\xfe line\n" * 20
WORDS = "text " * 99
SPAN = json.dumps({"inputs": "a", "targets": ""}) + "\n"


def missing_text(ws):
    return {"kind": "text", "path": str(ws.folder / "none.txt"), "context": 16}


def empty_text_folder(ws):
    return {"kind": "text", "path": str(ws.write("texts/.keep", "").parent), "context": 16}


def broken_tokenizer(ws):
    return {**text_file("a.txt", WORDS)(ws), "tokenizer": str(ws.write("tokenizer.json", "{}"))}


def missing_records(ws):
    return {"kind": "input_ids", "path": str(ws.folder), "context": 16, "vocab_size": 257}


def damaged_records(ws):
    return {**missing_records(ws), "path": str(ws.write("a.tfrecord", b"\1" * 40))}


def evaluator_with_another_end_of_text(ws):
    data = {"kind": "megatron", "path": str(token_file(ws)), "context": 16, "vocab_size": 257, "end_of_text": 3}
    return f"evals={ {'validation': {'type': 'perplexity', 'data': data}} }"


COUNT = "images of 2 classes"  # part of the line about a folder

BAD_DATA = {
    "missing image folder": bad(image_folder(lambda ws: ws.folder / "nowhere"), "no folder"),
    "image folder without classes": bad(
        image_folder(lambda ws: ws.write("pets/train/.keep", "").parents[1]), "no class folders"
    ),
    "class folder without images": bad(
        image_folder(lambda ws: ws.write("pets/train/cat/notes.md", "").parents[2]), "no images"
    ),
    "file that is not an image": bad(
        image_folder(with_file("train/cat/0.png", "no image", images("pets"))), "0.png", notice=COUNT
    ),
    "empty image file": bad(image_folder(with_file("train/cat/0.png", "", images("pets"))), "0.png", notice=COUNT),
    "evaluation data of other classes": bad(
        image_folder(images("pets"), lambda ws: image_evaluator(images("others", ("cat", "fox"))(ws), "2")),
        "other classes than the training data",
        notice=COUNT,
    ),
    "class that is missing in training": bad(
        image_folder(with_file("val/bird/0.png", "x", images("pets"))), "class 'bird'", notice=COUNT
    ),
    "fewer images than a batch": bad(image_folder(images("pets", count=1)), "2 examples", "batch of 8", notice=COUNT),
    "limit of 0": bad(vit("input.data.limit=0"), "limit=0", "1"),
    "negative limit": bad(vit("evals.test.data.limit=-3"), "limit=-3", "1"),
    "labels beyond the classes": bad(vit("input.pp=value_range(-1, 1)|onehot(5)|keep('image', 'labels')"), "5"),
    "preprocessing of 5000 ops": bad(vit("input.pp=" + "|".join(["flip_lr"] * 5000)), "preprocessing"),
    "preprocessing that cannot be parsed": bad(vit("input.pp=value_range(-1, 1"), "cannot parse"),
    "missing text file": bad(text(missing_text), "none.txt"),
    "empty folder of text": bad(text(empty_text_folder), "no files at"),
    "text file of another kind": bad(text(text_file("a.pdf", "%PDF")), "a.pdf", ".txt"),
    "text that is not UTF-8": bad(text(text_file("a.txt", NOT_UTF8)), "a.txt:2: not UTF-8", "byte 5"),
    "empty text": bad(text(text_file("a.txt", "")), "no text"),
    "text shorter than a batch": bad(text(text_file("a.txt", "short")), "1 examples", "batch of 8"),
    "line that is not JSON": bad(text(text_file("a.jsonl", json_lines(40) + "{'text': 1}\n")), "a.jsonl:41: not JSON"),
    "line without its key": bad(
        text(text_file("a.jsonl", json_lines(40) + '{"txt": "x"}\n')), "a.jsonl:41", "'text'", "'txt'"
    ),
    "validation split of size 0": bad(text(text_file("a.txt", WORDS, split="validation")), "validation_fraction"),
    "context of 0": bad(text(text_file("a.txt", WORDS, context=0)), "context"),
    "missing tokenizer": bad(text(text_file("a.txt", WORDS, tokenizer="/no/tokenizer.json")), "/no/tokenizer.json"),
    "file that is not a tokenizer": bad(text(broken_tokenizer), "tokenizer.json"),
    "empty targets": bad(text(text_file("a.jsonl", SPAN, kind="spans")), "a.jsonl:1", "'targets'", "empty"),
    "answers without marks": bad(
        text(text_file("a.jsonl", '{"task_id": "a", "texts": "no mark"}\n', kind="answers")), "a.jsonl:1: no answer"
    ),
    "unknown generated task": bad(text(lambda ws: {"kind": "synthetic", "tasks": ["first/thing/*"]}), "first/thing/*"),
    "unknown relation of scenes": bad(vit("input.data={'kind': 'scenes', 'relations': ['behind']}"), "list of right"),
    "tokens without .idx": bad(text(tokens(lambda idx: idx.unlink())), "pair"),
    "tokens without .bin": bad(text(tokens(lambda idx: idx.with_suffix(".bin").unlink())), "pair"),
    "index of another format": bad(text(tokens(patch(0, b"NOTMEGA"))), "Megatron"),
    "index of another version": bad(text(tokens(patch(9, b"\7"))), "version 7", "1"),
    "index of floats": bad(text(tokens(patch(17, b"\6"))), "dtype code 6", "floats"),
    "truncated index": bad(text(tokens(lambda idx: idx.write_bytes(idx.read_bytes()[:-5]))), "pair.idx"),
    "empty index": bad(text(tokens(lambda idx: idx.write_bytes(b""))), "Megatron"),
    "index of more tokens than the file has": bad(
        text(tokens(patch(INDEX_HEADER.size, struct.pack("<i", 9999)))), "pair"
    ),
    "tokens beyond the vocabulary": bad(text(tokens(vocab_size=10)), "pair.bin, row 0", "token 10", "10"),
    "tokens beyond the vocabulary in a later row": bad(text(tokens(vocab_size=190)), "token 190", starts=True),
    "tokens beyond the model's vocabulary": bad(text(tokens(vocab_size=300)), "300 tokens", "config.vocab_size=257"),
    "tokens of an unknown vocabulary": bad(text(tokens(vocab_size=None)), "config.input.data.vocab_size"),
    "missing records": bad(text(missing_records), "no files at"),
    "damaged records": bad(text(damaged_records), "a.tfrecord", "damaged", "record 0", notice="records"),
    "evaluation data with another end of text": bad(
        text(text_file("a.txt", WORDS), evaluator_with_another_end_of_text), "3", "256"
    ),
    "images for a language model": bad(text(lambda ws: {"kind": "digits"}), "no text"),
    "text for an image model": bad(vit("input.data={'kind': 'stdlib', 'context': 16}"), "'image'"),
}
