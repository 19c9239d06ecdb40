"""Small corpora, tokenizers trained on them, and a reference implementation of packing tokens into rows."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

END = "<|endoftext|>"
DOCUMENTS = (
    "def main():\n    return 0\n",
    f"A document that speaks of {END} and of <|pad|> in the middle of its text.",
    "Grüße, 日本語 und 🎉🎉 — naïve café\r\n\ttabs  and   spaces ",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 9,
    "line one\n\nline three\u2028\x00end",
)


def documents(n: int = 40) -> list[str]:
    """Different documents of various lengths; several contain the text of special tokens."""
    return [f"{i}: {DOCUMENTS[i % len(DOCUMENTS)]}" * (1 + i % 3) for i in range(n)]


def train_tokenizer(path: Path, spelling: str = "bytes") -> Path:
    """Train a small tokenizer on DOCUMENTS and write its tokenizer.json.

    `spelling` is "bytes" (GPT-2's byte alphabet), "nested" (the same with parts nested in sequences, as in Llama 3),
    "text" (text with tokens of single bytes as a fallback, as in Llama 2), or "words" (tokens of unknown bytes).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<unk>", END, "<|pad|>"]
    if spelling == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(DOCUMENTS, trainers.WordLevelTrainer(special_tokens=special))
    elif spelling == "text":
        tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"aehnotu", "an", "the", "▁the"]
        vocab = {token: i for i, token in enumerate(tokens)}
        merges = [("a", "n"), ("t", "h"), ("th", "e"), ("▁", "the")]
        vocab["th"] = len(vocab)
        tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.add_special_tokens(special)
    else:
        tokenizer = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        nested = [pre_tokenizers.Digits(), pre_tokenizers.Sequence([level])]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(nested) if spelling == "nested" else level
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(DOCUMENTS, trainer)
        tokenizer.add_tokens(
            [AddedToken("   ", normalized=False)]
        )  # an added token that is text, as Pythia's runs of spaces
    tokenizer.save(str(path))
    return path


def write_jsonl(path: Path, texts: Iterable[str], key: str = "text") -> Path:
    """Write one line per document; every second line is ASCII with escapes."""
    lines = (json.dumps({"meta": {"n": i}, key: t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts))
    return write(path, "".join(f"{line}\n" for line in lines).encode())


def write(path: Path, content: bytes, frames: int = 3) -> Path:
    """Write the content, compressed in several zstd frames if the name ends in .zst."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".zst"):
        import zstandard

        size = -(-len(content) // frames)
        pieces = [content[i * size : (i + 1) * size] for i in range(frames)]
        content = b"".join(zstandard.ZstdCompressor(write_checksum=True).compress(piece) for piece in pieces)
    path.write_bytes(content)
    return path


def example(values: Mapping[str, Sequence[int]]) -> bytes:
    """A serialized tf.train.Example of int64 lists, as TensorFlow writes it."""
    import tensorflow as tf

    lists = {k: tf.train.Feature(int64_list=tf.train.Int64List(value=v)) for k, v in values.items()}
    data: bytes = tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()
    return data


def write_input_ids(path: Path, records: Sequence[bytes]) -> Path:
    """Write a TFRecord file with TensorFlow."""
    import tensorflow as tf

    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def write_megatron(prefix: Path, sequences: Sequence[Sequence[int]], code: int = 8, dtype: str = "<u2") -> Path:
    """Write a .bin/.idx pair in Megatron's format."""
    sizes = [len(sequence) for sequence in sequences]
    width = np.dtype(dtype).itemsize
    starts = [sum(sizes[:i]) * width for i in range(len(sizes))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    index += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(sizes)}q", *starts)
    index += struct.pack(f"<{len(sizes) + 1}q", *range(len(sizes) + 1))
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    return prefix


def packed(sequences: Iterable[Sequence[int]], end: int, context: int) -> list[dict[str, Any]]:
    """Rows of concatenated documents, each followed by `end`."""
    stream = [token for sequence in sequences for token in (*sequence, end)]
    rows = []
    for start in range(0, len(stream), context + 1):
        piece = stream[start : start + context + 1]
        filling = [0] * (context + 1 - len(piece))
        targets = [False] + [True] * (len(piece) - 1) + [False] * len(filling)
        if any(targets):
            rows.append({"tokens": piece + filling, "is_target": targets})
    return rows


def oracle(tokenizer: Path | None, texts: Sequence[str]) -> tuple[list[list[int]], int]:
    """The tokens of texts, and the token that ends a text.

    The tokens are bytes, or those of a tokenizer from whose file the special tokens are removed, so that no text can be
    encoded as a special token.
    """
    if tokenizer is None:
        return [list(text.encode()) for text in texts], 256
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.read_text())
    end = next(token["id"] for token in content["added_tokens"] if token["content"] == END)
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    plain = Tokenizer.from_str(json.dumps(content))
    return [plain.encode(text).ids for text in texts], end


def rows(source: Any) -> list[dict[str, Any]]:
    """All rows of a source as lists."""
    return [{key: value.tolist() for key, value in source[i].items()} for i in range(len(source))]


def sequences(rng: np.random.Generator, high: int = 60_000) -> list[list[int]]:
    """Thirty sequences of 1 to 39 random tokens from 1 on."""
    return [rng.integers(1, high, rng.integers(1, 40)).tolist() for _ in range(30)]


def written_megatron(
    prefix: Path, documents: Iterable[Sequence[int]], vocab_size: int = 10, end: int | None = None
) -> None:
    """Write a .bin/.idx pair with the package's writer."""
    from input_pipeline.text.megatron import write_pair

    write_pair(str(prefix), documents, {"vocab_size": vocab_size, "end_of_text": end})
