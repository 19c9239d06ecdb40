"""Tokenizers: lossless encoding of text, bytes of each token, and errors that name the file."""

import importlib.util

import corpora
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.text import tokenizer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")


@pytest.mark.parametrize("spelling", ["bytes", "nested", "text"])
def test_token_bytes_sum_to_the_size_of_the_text_and_decoding_restores_it(tmp_path, spelling):
    opened = tokenizer.open_tokenizer(str(corpora.train_tokenizer(tmp_path / "tokenizer.json", spelling)))
    assert opened.token_bytes.shape == (opened.vocab_size,)
    assert opened.token_bytes.dtype == np.int32
    assert opened.token_bytes[opened.end_of_text] == 0
    for text in corpora.documents():
        ids = opened.encode(text)
        assert opened.end_of_text not in ids
        assert opened.token_bytes[ids].sum() == len(text.encode())
        assert opened.decode([*ids, opened.end_of_text]) == text
        assert opened.encode_batch([text, "x"])[0].tolist() == ids


def test_tokens_of_the_byte_tokenizer_are_bytes():
    opened = tokenizer.open_tokenizer(None)
    for text in corpora.documents():
        ids = opened.encode(text)
        assert ids == list(text.encode())
        assert opened.token_bytes[[*ids, 256]].sum() == len(ids)
        assert opened.decode([*ids, 256]) == text


def test_incomplete_character_decodes_to_the_replacement_character(tokenizer_json):
    for opened in (tokenizer.open_tokenizer(None), tokenizer.open_tokenizer(str(tokenizer_json))):
        ids = opened.encode("a🧪")
        shown = [opened.decode(ids[:n]) for n in range(1, len(ids) + 1)]
        assert shown == ["a", *["a\ufffd"] * (len(ids) - 2), "a🧪"]
        assert len(ids) > 3


def test_token_bytes_of_an_unknown_spelling_are_none(tmp_path):
    path = corpora.train_tokenizer(tmp_path / "tokenizer.json", "words")
    assert tokenizer.open_tokenizer(str(path)).token_bytes is None


def test_template_truncation_and_padding_of_the_file_are_not_applied(tmp_path, tokenizer_json):
    from tokenizers import Tokenizer, processors

    changed = Tokenizer.from_file(str(tokenizer_json))
    changed.post_processor = processors.TemplateProcessing(
        single=f"{corpora.END} $A", special_tokens=[(corpora.END, 1)]
    )
    changed.enable_truncation(4)
    changed.enable_padding(length=9)
    changed.save(str(tmp_path / "tokenizer.json"))
    one, other = (tokenizer.open_tokenizer(str(path)) for path in (tokenizer_json, tmp_path))
    for text in corpora.documents():
        assert one.encode(text) == other.encode(text) == other.encode_batch([text])[0].tolist()


def test_invalid_tokenizers_are_named(tmp_path, tokenizer_json):
    with pytest.raises(ip.MissingDataError, match=r"no tokenizer .*nowhere: give a tokenizer\.json"):
        tokenizer.open_tokenizer(str(tmp_path / "nowhere"))
    broken = corpora.write(tmp_path / "tokenizer.json", b'{"model": 3}')
    with pytest.raises(ip.InputError, match=r"tokenizer\.json is not a valid tokenizer\.json: "):
        tokenizer.open_tokenizer(str(broken))
    with pytest.raises(ip.InputError, match=r"no special token '<\|endoftex\|>' .*did you mean '<\|endoftext\|>'"):
        tokenizer.open_tokenizer(str(tokenizer_json), "<|endoftex|>")
