"""Megatron's .bin/.idx pairs: rows, selection, the format of written ones, and errors that name the damaged file."""

import json
import signal
import subprocess
import sys

import corpora
import numpy as np
import pytest
from refusals import refused

import input_pipeline as ip
from input_pipeline.text.megatron import write_pair

CONTEXT = 16
RNG = np.random.default_rng(0)


def open_pair(path, **options):
    return ip.open_source("megatron", **{"path": str(path), "context": CONTEXT, "vocab_size": 65_536, **options})


@pytest.mark.parametrize(
    ("code", "dtype", "high"),
    [(1, "u1", 256), (4, "<i4", 2**20), (8, "<u2", 2**16)],
)
def test_documents_of_every_dtype_are_packed(tmp_path, code, dtype, high):
    documents = corpora.sequences(RNG, high)
    prefix = corpora.write_megatron(tmp_path / "pile", [[*s, 0] for s in documents], code, dtype)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        source = open_pair(path, vocab_size=high, end_of_text=0)
        assert corpora.rows(source) == corpora.packed(documents, 0, CONTEXT)
        assert (source.vocab_size, source.end_of_text, source.token_bytes) == (high, 0, None)
        assert source.describe(3) == f"{prefix}.bin, row 3"


def test_rows_are_selected_as_by_a_slice(tmp_path):
    prefix = corpora.write_megatron(tmp_path / "pile", RNG.integers(0, 9, (50, CONTEXT + 1)).tolist())
    complete = corpora.rows(open_pair(prefix))
    assert len(complete) == 50
    for chosen in ((0, -7), (-7, None), (None, 7), (3, 30), (0, 10**9)):
        source = open_pair(prefix, rows=chosen)
        assert corpora.rows(source) == complete[slice(*chosen)]
        assert source.describe(0).endswith(f"row {range(50)[slice(*chosen)][0]}")
        assert source.nbytes() == 2 * (CONTEXT + 1) * len(source)


def test_token_bytes_of_a_padded_vocabulary_come_from_the_tokenizer(tmp_path, tokenizer_json):
    prefix = corpora.write_megatron(tmp_path / "pile", [[1, 2, 3] * 9, [5, 1]])
    source = open_pair(prefix, tokenizer=str(tokenizer_json), vocab_size=None)
    assert (len(source.token_bytes), source.end_of_text) == (source.vocab_size, 1)
    padded = open_pair(prefix, tokenizer=str(tokenizer_json), vocab_size=512, end_of_text=2)
    assert (padded.vocab_size, padded.end_of_text) == (512, 2)
    np.testing.assert_array_equal(padded.token_bytes[: source.vocab_size], source.token_bytes)
    assert not padded.token_bytes[source.vocab_size :].any()


def test_token_outside_the_vocabulary_is_named(tmp_path):
    documents = [[1] * (CONTEXT + 1) for _ in range(5)]
    documents[3][7] = 700
    prefix = corpora.write_megatron(tmp_path / "pile", documents)
    with pytest.raises(ip.InputError, match=r"pile\.bin, row 3: token 700 is not in the vocabulary of 700"):
        list(ip.eval_batches(open_pair(prefix, vocab_size=700), "", 2))
    with pytest.raises(ip.InputError, match=r"pile\.bin, row 3: token 700"):
        open_pair(prefix, vocab_size=700, rows=(3, None))
    assert len(list(ip.eval_batches(open_pair(prefix, vocab_size=701), "", 5))) == 1
    negative = corpora.write_megatron(tmp_path / "negative", [[1, -1, 2]], 4, "<i4")
    with pytest.raises(ip.InputError, match=r"negative\.bin, row 0: token -1"):
        open_pair(negative, vocab_size=None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b, i: (b, b"MMIDIDY" + i[7:]), r"pile\.idx is not a Megatron index"),
        (lambda b, i: (b, i[:-8]), r"pile\.idx has [\d,]+ bytes, its header needs [\d,]+: cut off"),
        (lambda b, i: (b[:-2], i), r"pile\.bin has .* bytes, .*pile\.idx needs .*: cut off, or not of one pair"),
        (lambda b, i: (b, None), r"no file .*pile\.idx: expected"),
    ],
)  # fmt: skip
def test_damaged_pair_is_named(tmp_path, damage, message):
    prefix = corpora.write_megatron(tmp_path / "pile", corpora.sequences(RNG))
    files = [prefix.with_suffix(suffix) for suffix in (".bin", ".idx")]
    for file, content in zip(files, damage(*(file.read_bytes() for file in files)), strict=True):
        file.unlink() if content is None else file.write_bytes(content)
    with refused(ip.InputError, match=message):
        open_pair(prefix)


@pytest.mark.slow
def test_rows_of_another_length_than_the_context_are_refused(tmp_path):
    prefix = corpora.write_megatron(tmp_path / "pile", np.ones((9, 2049), int).tolist())
    with pytest.raises(ip.InputError, match="rows of 2049 tokens, the config's context 1024 needs 1025"):
        open_pair(prefix, context=1024)
    assert len(open_pair(prefix, context=2048)) == 9
    for chosen, message in (((9, None), "holds 9 rows, of which"), ((1,), "should be two numbers")):
        with pytest.raises(ip.InputError, match=message):
            open_pair(prefix, context=2048, rows=chosen)


@pytest.mark.parametrize(("vocab_size", "code", "dtype"), [(65_536, 8, "<u2"), (65_537, 4, "<i4")])
def test_files_have_megatrons_format_byte_for_byte(tmp_path, vocab_size, code, dtype):
    documents = corpora.sequences(RNG, vocab_size)
    corpora.written_megatron(tmp_path / "new" / "pile", documents, vocab_size, 0)
    expected = corpora.write_megatron(tmp_path / "expected", documents, code, dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"new/pile{suffix}").read_bytes() == expected.with_suffix(suffix).read_bytes()
    description = json.loads((tmp_path / "new/pile.json").read_bytes())
    tokens = sum(map(len, documents))
    assert description == {"vocab_size": vocab_size, "end_of_text": 0, "documents": len(documents), "tokens": tokens}
    source = ip.open_source("megatron", path=str(tmp_path / "new/pile"), context=CONTEXT)
    assert (source.vocab_size, source.end_of_text) == (vocab_size, 0)


def test_invalid_description_or_one_of_another_pair_is_refused(tmp_path):
    corpora.written_megatron(tmp_path / "pile", [[1, 2, 3], [4, 5]])
    path = tmp_path / "pile.json"
    valid = path.read_text()
    for old, new, message in (
        ('"documents": 2', '"documents": 3', "json gives 3 documents, but the .idx 2 sequences"),
        ('"end_of_text": null', '"end_of_text": 10', "end_of_text=10 is not in the voc"),
    ):
        path.write_text(valid.replace(old, new))
        with pytest.raises(ip.InputError, match=message):
            ip.open_source("megatron", path=str(tmp_path / "pile"), context=CONTEXT)


def test_written_documents_of_equal_length_are_packed(tmp_path):
    corpora.written_megatron(tmp_path / "pile", [[1, 2, 3]] * 20)
    source = ip.open_source("megatron", path=str(tmp_path / "pile"), context=CONTEXT)
    assert (len(source), source.end_of_text) == (4, None)


def test_failed_writer_leaves_no_files(tmp_path):
    for documents, message in (([[1, 2], [10]], "token 10 is not in the vocabulary of 10"), ([], "no documents to")):
        with pytest.raises(ip.InputError, match=message):
            corpora.written_megatron(tmp_path / "a", documents)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path):
    (tmp_path / "a.json").write_text("mine")
    with pytest.raises(ip.InputError, match=r"a\.json already exists"):
        write_pair(str(tmp_path / "a"), [[1]], {"vocab_size": 10})
    assert (tmp_path / "a.json").read_text() == "mine"


@pytest.mark.slow
def test_files_of_a_killed_writer_cannot_be_opened(tmp_path):
    code = (
        "import itertools, numpy as np, input_pipeline.text.megatron as m\n"
        "endless = (print('x', flush=True) or np.ones(1000, int) for _ in itertools.count())\n"
        f"m.write_pair({str(tmp_path / 'a')!r}, endless, {{'vocab_size': 10}})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.read(100)
        process.send_signal(signal.SIGKILL)
    with pytest.raises(ip.MissingDataError, match="no file"):
        ip.open_source("megatron", path=str(tmp_path / "a"), context=CONTEXT, vocab_size=10)
    corpora.written_megatron(tmp_path / "a", [[1, 2]])
    assert len(ip.open_source("megatron", path=str(tmp_path / "a"), context=CONTEXT, vocab_size=10)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.json"]
