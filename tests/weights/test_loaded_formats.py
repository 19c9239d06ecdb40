"""`dcvit.load` reads what a conversion writes: classes, kind of probabilities, ends of texts and tokenizers."""

import json
import logging

import conversion_models
import numpy as np
import pytest
import small_models
from conversion_models import open_saved, write
from PIL import Image
from scipy.special import expit, softmax

import dcvit
from dcvit.errors import CheckpointError
from dcvit.inference.sampling import Sampling
from dcvit.inference.texts import TextOptions
from dcvit.runs import workdir
from dcvit.weights.export import conversion, formats
from input_pipeline.text.tokenizer import BYTE_END_OF_TEXT, END_OF_TEXT, ByteTokenizer, open_tokenizer

LETTERS = [*(chr(ord("a") + i) for i in range(small_models.VOCAB - 1)), "<end>"]
NAMES = tuple(f"class {i}" for i in range(10))
PLAIN = dict(compose=None, pool_type="tok", mlp="gelu", norm_epsilon=1e-6)
pytestmark = pytest.mark.usefixtures("library_promotion")


def described(model, **values):
    return model._replace(description=model.description._replace(**values))


@pytest.mark.interop
def test_transformers_reads_the_names(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")
    for fields in ({}, PLAIN):
        model = described(conversion_models.image_model(**fields)[2], class_names=NAMES)
        folder = write(model, tmp_path / str(len(fields)), "hf")
        config = json.loads((folder / "config.json").read_text())
        kind = transformers.AutoConfig if fields else transformers.PretrainedConfig  # our class needs remote code
        found = kind.from_pretrained(folder) if fields else kind.from_dict(config)
        assert found.id2label == dict(enumerate(NAMES))
        assert found.label2id == {name: i for i, name in enumerate(NAMES)}
        assert found.num_labels == 10


def several_labels(fields, multilabel=True):
    """Return a model whose probabilities are sigmoids, of classes with names."""
    return described(conversion_models.image_model(depth=1, **fields)[2], multilabel=multilabel, class_names=NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(("to", "fields"), [("dcvit", PLAIN), ("safetensors", PLAIN), ("hf", PLAIN), ("hf", {})])
def test_probabilities_of_several_labels_stay_sigmoids(to, fields, tmp_path):
    image = np.random.default_rng(0).uniform(-1, 1, (16, 16, 3)).astype(np.float32)
    for kind, multilabel in ((expit, True), (softmax, False)):
        model = dcvit.load(write(several_labels(fields, multilabel), tmp_path / kind.__name__, to))
        found = {NAMES.index(p.label): p.probability for p in model.predict(image, topk=10)[0]}
        logits = model.features(image[None], "logits")[0]
        np.testing.assert_allclose([found[c] for c in range(10)], kind(np.asarray(logits, np.float64)), atol=2e-6)
        saved = open_saved(tmp_path / kind.__name__)
        assert saved.config().get("loss") == ("sigmoid_xent" if multilabel else None)


def test_thresholds_of_a_run_are_written_beside_its_weights(tmp_path):
    """But for the weights of another step."""
    checkpoints = [tmp_path / "checkpoints" / step for step in ("4", "5")]
    for checkpoint in checkpoints:
        (checkpoint / "params").mkdir(parents=True)
    other, model = (several_labels(PLAIN)._replace(workdir=tmp_path, path=path) for path in checkpoints)
    found = workdir.Thresholds(tuple(i / 10 for i in range(10)), "val", 5)
    workdir.write_thresholds(tmp_path, found, NAMES)
    (folder := tmp_path / "out").mkdir()
    formats.write_thresholds(other, folder)
    assert workdir.read_thresholds(folder, NAMES) is None
    formats.write_thresholds(model, folder)
    assert workdir.read_thresholds(folder, NAMES) == found._replace(step=None)


def test_a_format_of_logits_only_is_a_warning(tmp_path, caplog, monkeypatch):
    model = several_labels(PLAIN)
    for to, warns in (("hf", False), ("timm", True)):
        monkeypatch.setitem(conversion.WRITERS, to, refuse_to_write)
        with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="not written"):
            conversion.convert([tmp_path / "model"], tmp_path / to, to, lambda _: model)
        assert ("timm cannot say that probabilities are sigmoids of the logits" in caplog.text) == warns


def refuse_to_write(weights, folder):
    raise CheckpointError("not written")


@pytest.mark.interop
@pytest.mark.slow
def test_a_pipeline_of_transformers_computes_the_same_sigmoids(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")
    model = dcvit.load(write(several_labels(PLAIN), tmp_path / "hf", "hf"))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8))
    classify = transformers.pipeline("image-classification", str(tmp_path / "hf"), device="cpu")
    expected = {row["label"]: row["score"] for row in classify(picture, top_k=10)}
    assert sum(expected.values()) > 1.5
    for prediction in model.predict([picture], topk=10)[0]:
        assert prediction.probability == pytest.approx(expected[prediction.label], abs=1e-5)


@pytest.fixture
def text(tmp_path):
    """A folder of transformers with a tokenizer whose tokens are the letters of a language model."""
    model = conversion_models.language_model("Transformer++-405M", compose=None, depth=1)[2]
    save_tokenizer(tmp_path, {})
    return write(model, tmp_path, "hf"), model


def continued(model):
    return model.continue_texts(["cab"], TextOptions(6, Sampling(temperature=2.0), seed=1)).texts[0]


@pytest.mark.slow
def test_a_text_ends_at_the_token_that_the_config_names(text):
    folder, _ = text
    (file,) = folder.glob("*.safetensors")
    whole = continued(dcvit.load(file))  # with the tokenizer beside it
    assert (whole.tokens, whole.ended) == (6, "length")
    letters = whole.text.split()
    count = next(i for i in range(1, 6) if letters[i] not in letters[:i])
    token = LETTERS.index(letters[count])
    for name, value in (("generation_config.json", [0x7FFF, token]), ("config.json", token)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": value}))
        found = continued(dcvit.load(folder))
        assert (found.text.split(), found.tokens, found.ended) == (letters[:count], count, "end_of_text")
        (folder / name).write_text(json.dumps(content))


def save_tokenizer(folder, config):
    """Write a tokenizer of letters and the files beside it that transformers writes."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers; pip install -e .[lm]")
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="a"))
    tokenizer.add_special_tokens(list(LETTERS[-2:]))
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


GIVEN = {
    "eos_token": {"__type": "AddedToken", "content": LETTERS[-2], "special": True},
    "pad_token": LETTERS[-1], "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Own",
}  # fmt: skip


@pytest.mark.interop
@pytest.mark.parametrize(
    ("given", "fields", "by_run"),
    [({}, {"compose": None}, False), (GIVEN, {}, False), (GIVEN, {"compose": None}, True)],
)
def test_the_tokenizer_of_transformers_keeps_special_tokens_and_template(given, fields, by_run, tmp_path, monkeypatch):
    """A batch is padded and keeps its tokens on the right; no code is asked for, and none is executed."""
    transformers = pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")
    save_tokenizer(tmp_path, given)
    model = conversion_models.language_model("DCFormer++-405M", depth=1, **fields)[2]
    model = described(model, end_tokens=(len(LETTERS) - 1,))._replace(path=tmp_path)
    if by_run:
        model = open_saved(write(model, tmp_path / "run", "dcvit"))
    folder = write(model, tmp_path / "hf", "hf")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks to run code"))
    found = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert (found.eos_token, found.pad_token) == ((LETTERS[-2], LETTERS[-1]) if given else (LETTERS[-1],) * 2)
    rows = found(["cab", "b"], padding=True)
    assert rows.keys() == {"input_ids", "attention_mask"}
    assert rows["input_ids"] == [[2, 0, 1], [len(LETTERS) - 1] * 2 + [1]]
    if given:
        assert found.apply_chat_template([{"role": "user", "content": "cab"}], tokenize=False) == "cab"


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    """Return the folder for transformers of a model that a run trained with text, and without a tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_models, "VOCAB", ByteTokenizer.vocab_size)
        model = conversion_models.language_model("Transformer++-405M", depth=1)[2]
    record = {"input": {"data": {"kind": "text", "path": "*.txt"}}}
    model = described(model, end_tokens=(BYTE_END_OF_TEXT,))._replace(record=record)
    return write(model, tmp_path_factory.mktemp("hf"), "hf")


@pytest.mark.slow
def test_the_written_tokenizer_of_bytes_is_that_of_the_run(bytes_folder):
    written, ours = open_tokenizer(str(bytes_folder)), ByteTokenizer()
    for text in ("", f" \t{END_OF_TEXT}\x00", "".join(map(chr, range(300))), "caf\u00e9 \U0001f389"):
        assert written.encode(text) == ours.encode(text)
        assert written.decode(ours.encode(text)) == text
    tokens = [*range(BYTE_END_OF_TEXT, -1, -1)]
    assert written.decode(tokens) == ours.decode(tokens)
    assert (written.end_of_text, written.vocab_size) == (ours.end_of_text, ours.vocab_size)
    assert written.token_bytes.tolist() == ours.token_bytes.tolist()


@pytest.mark.interop
@pytest.mark.slow
def test_transformers_opens_the_tokenizer_of_bytes(bytes_folder):
    transformers = pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")
    text = f" caf\u00e9\n{END_OF_TEXT} \U0001f389\x00\xad"
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        tokenizer = kind.from_pretrained(bytes_folder)
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
        assert tokenizer.eos_token_id == tokenizer.pad_token_id == BYTE_END_OF_TEXT


@pytest.mark.slow
def test_a_converted_workdir_keeps_class_names_and_the_end_of_texts(text, tmp_path, caplog):
    folder, model = text
    run = write(described(model, end_tokens=(len(LETTERS) - 1, 3))._replace(path=folder), tmp_path / "run", "dcvit")
    assert f"one token that ends a text, here {len(LETTERS) - 1}; others are lost: [3]" in caplog.text
    assert dcvit.load(run).tokenizer.end_of_text == len(LETTERS) - 1
    assert open_saved(run).description.end_tokens == (len(LETTERS) - 1,)  # of a later export
    tokens = write(described(model, end_tokens=(3,)), tmp_path / "tokens", "dcvit")
    assert open_saved(tokens).description.end_tokens == (3,)  # without a tokenizer
