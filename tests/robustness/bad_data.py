"""Bad data: missing, empty, damaged or of another kind than the model needs."""

from workspace import (
    bad,
    image_folder,
    images,
    json_lines,
    text,
    text_file,
    token_file,
    tokens,
    vit,
    with_file,
)

NOT_UTF8 = b"good line\nbad \xff\xfe line\n" * 20
WORDS = "text " * 99


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
    "file that is not an image": bad(
        image_folder(with_file("train/cat/0.png", "no image", images("pets"))), "0.png", notice=COUNT
    ),
    "empty image file": bad(image_folder(with_file("train/cat/0.png", "", images("pets"))), "0.png", notice=COUNT),
    "fewer images than a batch": bad(image_folder(images("pets", count=1)), "2 examples", "batch of 8", notice=COUNT),
    "negative limit": bad(vit("evals.test.data.limit=-3"), "limit=-3", "1"),
    "preprocessing of 5000 ops": bad(vit("input.pp=" + "|".join(["flip_lr"] * 5000)), "preprocessing"),
    "text that is not UTF-8": bad(text(text_file("a.txt", NOT_UTF8)), "a.txt:2: not UTF-8", "byte 5"),
    "text shorter than a batch": bad(text(text_file("a.txt", "short")), "1 examples", "batch of 8"),
    "line without its key": bad(
        text(text_file("a.jsonl", json_lines(40) + '{"txt": "x"}\n')), "a.jsonl:41", "'text'", "'txt'"
    ),
    "missing tokenizer": bad(text(text_file("a.txt", WORDS, tokenizer="/no/tokenizer.json")), "/no/tokenizer.json"),
    "unknown relation of scenes": bad(vit("input.data={'kind': 'scenes', 'relations': ['behind']}"), "list of right"),
    "truncated index": bad(text(tokens(lambda idx: idx.write_bytes(idx.read_bytes()[:-5]))), "pair.idx"),
    "tokens beyond the vocabulary": bad(text(tokens(vocab_size=10)), "pair.bin, row 0", "token 10", "10"),
    "tokens beyond the vocabulary in a later row": bad(text(tokens(vocab_size=190)), "token 190", starts=True),
    "tokens beyond the model's vocabulary": bad(text(tokens(vocab_size=300)), "300 tokens", "config.vocab_size=257"),
    "tokens of an unknown vocabulary": bad(text(tokens(vocab_size=None)), "config.input.data.vocab_size"),
    "damaged records": bad(text(damaged_records), "a.tfrecord", "damaged", "record 0", notice="records"),
    "evaluation data with another end of text": bad(
        text(text_file("a.txt", WORDS), evaluator_with_another_end_of_text), "3", "256"
    ),
}
