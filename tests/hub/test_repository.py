"""Models of the Hugging Face Hub, against a local server with the Hub's protocol: download, commits, cache, upload."""

import hashlib
import json
import re
import shutil

import conversion_models
import fake_hub
import jax
import numpy as np
import pytest
from conversion_models import open_saved, write
from trained_workdirs import DIGITS
from training_runs import digits_command

import dcvit
from dcvit import cli, convert, evaluate
from dcvit.config import load as configs
from dcvit.errors import CheckpointError, ConfigError, InputError
from dcvit.hub import repository
from dcvit.hub.source import find, init_config
from dcvit.runs import checksums
from dcvit.weights.safetensors_writer import write_shards
from input_pipeline import huggingface
from input_pipeline.text.tokenizer import open_tokenizer

hub_library = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub; pip install -e .[hub]")
pytestmark = [
    pytest.mark.usefixtures("library_promotion"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of huggingface_hub, in an upload
]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch, tmp_path, capsys):
    """A hub with an empty cache of this test, whose token is printed nowhere."""
    with fake_hub.serve() as served:
        fake_hub.use(monkeypatch, served, tmp_path / "cache")
        yield served
    out, err = capsys.readouterr()
    assert fake_hub.TOKEN not in out + err


@pytest.fixture
def folder(tmp_path):
    """A small image model in the project's own format."""
    return conversion_models.write(conversion_models.image_model(depth=1)[2], tmp_path / "model")


def offline(monkeypatch):
    monkeypatch.setattr(hub_library.constants, "HF_HUB_OFFLINE", True)


def parameters(name):
    """The parameters of a model that `find` opens, by path."""
    return {path: tensor.read() for path, tensor in find(str(name)).params.items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def changed(data, by=1):
    """Return the bytes of a file of weights with other values: only the last bytes of the last tensor differ."""
    return data[:-1] + bytes([data[-1] ^ by])


def line(error, action, *arguments, **options):
    """Call `action`, which must raise `error`, and return its message, which is one line."""
    with pytest.raises(error) as raised:
        action(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_name_is_parsed_or_refused_before_any_request():
    for name in ("hf:o1/n.a_m-e", f"hf:o/n/sub@{COMMIT}", "hf:o/n@refs/pr/1"):
        assert str(huggingface.parse(name)) == name
    for name in ("hf:", "hf:foo", "hf:owner/name/../..", "hf:a/b@../x"):
        assert "expected hf:OWNER/NAME" in line(InputError, huggingface.parse, name)


def test_a_model_is_downloaded_once_and_without_code_pickles_or_other_files(hub, folder):
    for extra in ("modeling.py", "pytorch_model.bin", "onnx/model.safetensors", "training_args.pt", "big.safetensors"):
        hub.commit("owner/name", {extra: b"no"})
    commit = hub.upload("owner/name", folder)
    assert same(parameters("hf:owner/name"), parameters(folder))
    requested = {path.rpartition("/")[2] for method, path in hub.requests if "/resolve/" in path}
    assert requested == {"config.json", "model.safetensors"}
    hub.requests.clear()
    assert same(parameters(f"hf:owner/name@{commit}"), parameters(folder))
    assert hub.requests == []


def test_shards_and_folders_of_a_repository_are_opened(hub, folder):
    tensors = ((name, np.array(value)) for name, value in parameters(folder).items())
    for file in folder.glob("*.safetensors"):
        file.unlink()
    write_shards(folder, tensors, max_shard_bytes=10_000)
    hub.commit("owner/name", {f"a/b/{path.name}": path.read_bytes() for path in folder.iterdir()})
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert same(parameters("hf:owner/name/a/b"), parameters(folder))


def test_a_commit_stays_when_the_repository_changes(hub, folder):
    old = hub.upload("owner/name", folder)
    before = parameters("hf:owner/name")
    new = hub.commit("owner/name", {"model.safetensors": changed((folder / "model.safetensors").read_bytes())})
    hub.commit("owner/name", {"README.md": b"other"}, branch="dev")
    assert same(parameters(f"hf:owner/name@{old}"), before)
    assert not same(parameters("hf:owner/name"), before)
    assert same(parameters(f"hf:owner/name@{new}"), parameters("hf:owner/name@main"))
    assert "0 safetensors files" in line(CheckpointError, find, "hf:owner/name@dev")


def test_a_config_holds_the_commit_and_a_run_keeps_its_own(hub, folder, tmp_path):
    def model_init(**options):
        return configs.load("vit_digits", [f"model_init={options.pop('name', 'hf:owner/name')}"], **options).model_init

    old = hub.upload("owner/name", folder)
    assert model_init() == f"hf:owner/name@{old}"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model_init": model_init()}))
    new = hub.commit("owner/name", {"README.md": b"new"})
    assert model_init() == f"hf:owner/name@{new}"
    assert model_init(workdirs=[tmp_path, tmp_path / "run"]) == f"hf:owner/name@{old}"
    assert model_init(workdirs=[tmp_path / "run"], name="hf:owner/name@main") == f"hf:owner/name@{new}"
    hub.commit("owner/other", {})
    assert "no revision 'v1'" in line(ConfigError, model_init, name="hf:owner/other@v1")


def test_the_arguments_of_a_config_have_the_commit_too(hub, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers; pip install -e .[lm]")
    weights = conversion_models.language_model("Transformer++-405M", compose=None, depth=1)[2]
    source = conversion_models.write(weights, tmp_path / "source")
    vocabulary = {letter: i for i, letter in enumerate("abcdefghijklmnop?")}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="?")).save(str(source / "tokenizer.json"))
    name = f"hf:owner/text@{hub.upload('owner/text', source)}"
    assert init_config(name)["input"]["data"]["tokenizer"] == name  # no path of this machine
    config = configs.load(f"lm_text:data_dir={tmp_path},init=hf:owner/text")
    data = [config.input.data, config.evals.validation.data]
    assert [config.model_init, *(each.tokenizer for each in data)] == [name] * 3
    tokenizer = open_tokenizer("hf:owner/text", None)
    assert (tokenizer.encode("abc"), tokenizer.origin) == ([0, 1, 2], name)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pytorch_model.bin": b"x"}, "has 0 safetensors files and no model.safetensors.index.json"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'}, "not a file beside it"),
        ({"model.safetensors": b"x", "checksums.sha256": b"0" * 64 + b"  model.safetensors\n"}, "is damaged"),
    ],
)
def test_a_repository_without_readable_weights_is_refused_in_one_line(hub, files, expected):
    hub.commit("owner/name", files)
    assert re.search(expected, line(CheckpointError, dcvit.load, "hf:owner/name"))


def test_missing_and_private_repositories_are_refused_in_one_line(hub, folder, monkeypatch):
    checksums.write(folder, name=checksums.WEIGHTS)
    (folder / "README.md").touch()
    made = repository.upload(folder, repository.check_upload("hf:owner/private", "safetensors"), private=True)
    assert "owner/private" in hub.private
    assert same(parameters(str(made)), parameters(folder))
    assert "no such repository at" in line(CheckpointError, find, "hf:owner/missing")
    monkeypatch.setenv("HF_TOKEN", "")
    shutil.rmtree(hub_library.constants.HF_HUB_CACHE)
    assert "a private one" in line(CheckpointError, find, "hf:owner/private")
    monkeypatch.setattr(fake_hub.Handler, "info", lambda handler, **_: handler._send(b"", 500))
    hub.upload("owner/name", folder)
    assert "cannot be reached, and the cache" in line(CheckpointError, find, "hf:owner/name")


def test_the_cache_needs_no_connection(hub, folder, monkeypatch):
    commit = hub.upload("owner/name", folder)
    assert "HF_HUB_OFFLINE is set" in (offline(monkeypatch) or line(CheckpointError, find, "hf:owner/name"))
    monkeypatch.setattr(hub_library.constants, "HF_HUB_OFFLINE", False)
    expected = parameters("hf:owner/name")
    hub.requests.clear()
    offline(monkeypatch)
    for name in ("hf:owner/name", "hf:owner/name@main", f"hf:owner/name@{commit}"):
        assert name.endswith("main") or same(parameters(name), expected)
    assert "HF_HUB_OFFLINE is set" in line(CheckpointError, find, f"hf:owner/name@{COMMIT}")
    assert hub.requests == []


def test_an_interrupted_download_is_continued_or_never_opened(hub, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.upload("owner/name", folder)
    hub.broken["model.safetensors"] = 100
    assert "cannot download hf:owner/name@" in line(CheckpointError, find, "hf:owner/name")
    with monkeypatch.context() as patch:
        offline(patch)
        assert "does not hold all files" in line(CheckpointError, find, "hf:owner/name")
    hub.broken["model.safetensors"] = 1
    assert same(parameters("hf:owner/name"), parameters(folder))


def test_weights_have_the_sha256_that_the_hub_states(hub, folder, monkeypatch):
    hub.upload("owner/name", folder)
    data = (folder / "model.safetensors").read_bytes()
    hub.lfs["model.safetensors"] = hashlib.sha256(changed(data)).hexdigest()
    assert "model.safetensors has the SHA-256" in line(CheckpointError, find, "hf:owner/name")
    with monkeypatch.context() as patch:
        offline(patch)
        line(CheckpointError, find, "hf:owner/name")  # the damaged file does not stay
    shutil.rmtree(hub_library.constants.HF_HUB_CACHE)
    hub.lfs["model.safetensors"] = hashlib.sha256(data).hexdigest()
    assert same(parameters("hf:owner/name"), parameters(folder))


def test_a_damaged_file_does_not_stay_when_a_download_is_interrupted(hub, folder, monkeypatch):
    hub.upload("owner/name", folder)
    hub.lfs["model.safetensors"] = "0" * 64
    download = hub_library.snapshot_download

    def interrupted(*args, allow_patterns, **options):
        root = download(*args, allow_patterns=allow_patterns, **options)
        if "model.safetensors" in allow_patterns:
            raise KeyboardInterrupt
        return root

    with monkeypatch.context() as patch:
        patch.setattr(hub_library, "snapshot_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            find("hf:owner/name")
    offline(monkeypatch)
    line(CheckpointError, find, "hf:owner/name")


def test_an_answer_that_leads_out_of_the_cache_or_never_ends_is_refused(hub, folder, tmp_path):
    hub.upload("owner/name", folder)
    before = {*tmp_path.iterdir()} | {tmp_path / "cache"}
    for tag in ("../../../out", f"{tmp_path}/out", "..", f"{'-' * 60}/"):
        hub.etags["model.safetensors"] = f'"{tag}"'
        assert "which is not the name of a file's content" in line(CheckpointError, find, "hf:owner/name")
        assert {*tmp_path.iterdir()} == before
    hub.loops = True
    hub.commit("owner/name", {"a.txt": b""})
    assert "a list of files that never ends" in line(CheckpointError, find, "hf:owner/name")


def push(source, target, *options, to="hf"):
    """Run `dcvit convert SOURCE TARGET --push owner/NAME`; return its exit status."""
    return cli.run(convert.main, [str(source), str(target), "--to", to, "--push", *options])


@pytest.mark.slow
def test_an_uploaded_run_computes_what_the_run_computes(hub, digits_workdir, tmp_path, capsys):
    assert push(digits_workdir, tmp_path / "out", "owner/digits") == 0
    name = re.search(r"uploaded as (hf:owner/digits@[0-9a-f]{40})\n", capsys.readouterr().out)[1]
    model, run = dcvit.load(name), dcvit.load(digits_workdir)
    images = np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, 1)).astype(np.float32)
    outputs = [jax.jit(m.module.apply)({"params": m.params}, images)[0] for m in (model, run)]
    np.testing.assert_array_equal(*outputs)
    assert list(model.class_names) == list(run.class_names)
    assert model.source == f"owner/digits@{name[-40:-28]}"
    card = hub_library.ModelCard((tmp_path / "out" / "README.md").read_text()).data
    last = json.loads((digits_workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (card.library_name, card.pipeline_tag) == ("dcvit", "image-classification")
    fields = [f"--config.model.{key}={DIGITS[f'model.{key}']}" for key in ("width", "depth", "mlp_dim", "patch_size")]
    argv = ["--config", "vit_digits", "--config.model.compose=None", *fields, "--checkpoint", "hf:owner/digits"]
    assert cli.run(evaluate.main, [*argv, "--format", "json"]) == 0
    assert f'"top1": {last["test/top1"]}' in capsys.readouterr().out
    assert cli.run(evaluate.main, ["--model", "hf:owner/digits"]) == 2
    assert f"{name} is not the folder of a training run; give --config CONFIG" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_resumed_run_loads_the_teacher_of_the_commit_that_it_recorded(hub, digits_workdir, tmp_path):
    old = hub.upload("owner/digits", write(open_saved(digits_workdir), tmp_path / "source"))

    def train():
        assert digits_command(tmp_path / "run", **{"distill.teacher": "hf:owner/digits", "evals": {}}) == 0
        return parameters(tmp_path / "run")

    whole = train()
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["distill"]["teacher"] == f"hf:owner/digits@{old}"
    hub.commit("owner/digits", {"model.safetensors": None, "pytorch_model.bin": b"x"})
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    assert same(train(), whole)


def test_an_upload_is_refused_before_the_conversion(hub, folder, tmp_path, monkeypatch, capsys):
    assert push(folder, tmp_path / "out", "owner/name@main") == 2
    assert "--push owner/name@main: expected OWNER/NAME" in capsys.readouterr().err
    assert push(folder, tmp_path / "out", "owner/name", to="onnx") == 2
    assert "hf, safetensors, timm" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert push(folder, tmp_path / "out", "owner/name") == 2
    assert "status 401; check HF_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert hub.branches == {}


@pytest.mark.slow
def test_a_failed_upload_leaves_the_folder_and_one_commit_replaces_other_weights(hub, folder, tmp_path, capsys):
    hub.broken["upload"] = 1
    assert push(folder, tmp_path / "failed", "owner/name", to="safetensors") == 2
    assert "cannot upload to hf:owner/name: " in capsys.readouterr().err
    assert same(parameters(tmp_path / "failed"), parameters(folder))
    assert hub.commits["owner/name"].keys() == {hub.branches["owner/name"]["main"]}  # no commit but the first
    hub.commit("owner/name", {"model-00001-of-00002.safetensors": b"old", "pytorch_model.bin": b"old", "a.txt": b""})
    before = len(hub.commits["owner/name"])
    out = tmp_path / "out"
    assert push(folder, out, "owner/name", to="safetensors") == 0
    commit, files = hub.files("owner/name", "main")
    assert len(hub.commits["owner/name"]) == before + 1
    assert files.keys() == {".gitattributes", "a.txt", *(path.name for path in out.iterdir())}
    assert f"uploaded as hf:owner/name@{commit}\n" in capsys.readouterr().out
    place = repository.check_upload("hf:owner/name", "safetensors")
    (out / "secret.txt").write_text("secret")
    (out / "keys").mkdir()
    (out / "keys" / "id_rsa").write_text("secret")
    (out / "passwd").symlink_to("/etc/passwd")
    repository.upload(out, place, False)
    assert hub.files("owner/name", "main")[1].keys() == files.keys()
    assert "owner/name exists and is public" in line((ConfigError, InputError), repository.upload, out, place, True)
    (out / "README.md").unlink()
    (out / "README.md").symlink_to("/etc/passwd")
    assert "README.md is not the file that the conversion wrote" in line(
        CheckpointError, repository.upload, out, place, False
    )
