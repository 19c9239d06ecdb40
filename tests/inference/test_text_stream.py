"""Text is returned while tokens are generated: complete characters only, and nothing from a stop string on."""

import corpora
import numpy as np
import pytest

from dcvit.inference.text_stream import TextStream, push_steps
from input_pipeline.text.tokenizer import ByteTokenizer, open_tokenizer

TEXT = "def é(x):\n    return '世界 🎉' # … done"
decode = ByteTokenizer().decode


def pieces(text, stop=(), after=b""):
    """The text returned for each byte and at the end, and the stream."""
    stream = TextStream(decode, stop, after=list(after))
    data = text if isinstance(text, bytes) else text.encode()
    return [*(stream.push(b) for b in data), stream.rest()], stream


@pytest.mark.parametrize(("text", "after"), [(TEXT * 8, ""), ("🎉" * 100, "before é"), ("a" * 200, "🎉" * 40)])
def test_a_character_is_returned_with_its_last_byte(text, after):
    found, stream = pieces(text, after=after.encode())
    assert "".join(found) == text
    assert found[-1] == ""
    ends = np.cumsum([len(c.encode()) for c in text])
    assert [i for i, piece in enumerate(found) if piece] == [end - 1 for end in ends]
    assert not stream.stopped


@pytest.mark.slow
@pytest.mark.parametrize(("spelling", "before"), [("bytes", ""), ("nested", "日本語日本語日本語"), ("text", "the 🎉")])
def test_text_is_complete_for_every_kind_of_tokenizer(tmp_path, spelling, before):
    """Some decode the bytes of an incomplete character, and of all characters before it, to one mark each."""
    tokenizer = open_tokenizer(str(corpora.train_tokenizer(tmp_path / "tokenizer.json", spelling)))
    for text in ("héllo 😀 日本 ok", "日本語" * 20, "the one 🎉🎉", TEXT):
        stream = TextStream(tokenizer.decode, after=tokenizer.encode(before))
        assert "".join([*map(stream.push, tokenizer.encode(text)), stream.rest()]) == text


def test_invalid_bytes_are_returned_once_and_do_not_delay_later_text():
    assert "".join(pieces(b"a\xff\xfe\xc3b\xf0\x9f\x8e")[0]) == "a\ufffd\ufffd\ufffdb"
    assert "".join(pieces(b"\xff" * 100 + b"!")[0]) == "\ufffd" * 100 + "!"
    assert "".join(pieces(b"a" + b"\xff" * 100)[0]) == "a"  # invalid bytes at the end could become a character


@pytest.mark.parametrize(
    ("stop", "before"), [(["return"], ""), (["界"], "abc " * 40), (["xyz", "done", "# …"], ""), (["' #", "'!"], "")]
)
def test_the_text_ends_before_the_first_stop_string(stop, before):
    text = before + TEXT
    expected = text[: min(i for i in map(text.find, stop) if i >= 0)]
    found, stream = pieces(text, stop)
    assert stream.stopped
    assert "".join(found) == expected


def test_text_kept_back_for_a_stop_string_is_returned_at_the_end():
    found, stream = pieces("aab aab aa", ["aabc", "aaa"])
    assert "".join(found) == "aab aab aa"
    assert (found[0], found[2], found[3], found[-1]) == ("", "", "aab ", "aa")
    assert not stream.stopped
    assert "".join(pieces("bc", ["abc"], after=b"a")[0]) == "bc"  # preceding tokens are not part of the text


@pytest.mark.slow
def test_steps_end_when_every_example_has_ended():
    streams = [TextStream(decode, ["c"]), TextStream(decode, ["z"])]
    steps = iter([[97, 120], [98, None], [99, None], [100, None]])
    assert list(push_steps(steps, streams)) == [[(0, "a"), (1, "x")], [(0, "b")], [(0, "")]]
    assert next(steps) == [100, None]
