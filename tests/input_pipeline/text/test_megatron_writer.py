"""The writer of Megatron's .bin/.idx pairs: its format, and no files of a failed or interrupted run."""

import json
import signal
import subprocess
import sys

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.text.megatron_writer import MegatronWriter

CONTEXT = 16
RNG = np.random.default_rng(0)


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


@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_existing_files_are_not_overwritten(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_text("mine")
    with pytest.raises(ip.InputError, match=rf"a\{suffix} already exists"):
        MegatronWriter(str(tmp_path / "a"), {"vocab_size": 10})
    assert (tmp_path / f"a{suffix}").read_text() == "mine"


@pytest.mark.slow
def test_files_of_a_killed_writer_cannot_be_opened(tmp_path):
    code = (
        "import numpy as np, input_pipeline.text.megatron_writer as m\n"
        f"with m.MegatronWriter({str(tmp_path / 'a')!r}, {{'vocab_size': 10}}) as writer:\n"
        "    while True: writer.add(np.ones(1000, int)); print('x', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.read(100)
        process.send_signal(signal.SIGKILL)
    with pytest.raises(ip.MissingDataError, match="no file"):
        ip.open_source("megatron", path=str(tmp_path / "a"), context=CONTEXT, vocab_size=10)
    corpora.written_megatron(tmp_path / "a", [[1, 2]])
    assert len(ip.open_source("megatron", path=str(tmp_path / "a"), context=CONTEXT, vocab_size=10)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.json"]
