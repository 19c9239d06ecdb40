"""Models in repositories of the Hugging Face Hub: download of a model's files, and upload of a converted one.

Weights are read from safetensors only. Pickles, and code such as a repository's own modeling files, are not downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcvit.errors import CheckpointError, ConfigError, InputError
from dcvit.runs import checksums
from dcvit.runs.workdir import THRESHOLDS
from dcvit.weights.tensors import FILE_NAMES, GENERATION, PROCESSOR, TOKENIZER, read_json, shards
from input_pipeline import huggingface
from input_pipeline.huggingface import Repository
from input_pipeline.optional import require

CONFIG = "config.json"
SAFETENSORS = ".safetensors"
WHOLE, INDEX = (name for name in FILE_NAMES if SAFETENSORS in name)
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Files beside the weights. All that a repository may have besides these and the weights stays there.
DESCRIPTIONS = (CONFIG, PROCESSOR, GENERATION, INDEX, *TOKENIZER_FILES, THRESHOLDS, checksums.WEIGHTS)
CARD = "README.md"  # its author may edit it, so it has no checksum
FORMATS = ("hf", "safetensors", "timm")  # of conversions that `download` and `dcvit.load` open


def download(name: str) -> Path:
    """Download the model of a repository; return its folder, or its file if that has an unusual name.

    Args:
      name: see `input_pipeline.huggingface`. Without a commit, it is that of the repository now.

    Raises:
      CheckpointError: the repository is missing or not accessible, or has no weights in safetensors; or the download
        was interrupted.
    """
    try:
        repository = huggingface.parse(huggingface.pinned(name))
        folder = huggingface.fetch(repository, DESCRIPTIONS)
        names = huggingface.listing(repository, folder)
        wanted = _weights(repository, names, folder)
        huggingface.fetch(repository, wanted)
    except InputError as e:
        raise CheckpointError(str(e)) from None
    if missing := [each for each in wanted if not (folder / each).is_file()]:
        raise CheckpointError(f"{repository} lacks {missing[0]}, or it is not in the cache")
    return folder if {WHOLE, INDEX} & {*names} else folder / wanted[0]


def _weights(repository: Repository, names: Sequence[str], folder: Path) -> list[str]:
    """Return the names of the weights among the files of a repository, in the order that transformers prefers.

    Raises:
      CheckpointError: there are none in safetensors, or several without an index.
    """
    if WHOLE in names:
        return [WHOLE]
    if INDEX in names:
        files = sorted(set(shards(folder / INDEX, read_json(folder / INDEX)).values()))
        if other := next((file for file in files if not file.endswith(SAFETENSORS)), None):
            raise CheckpointError(f"{repository}: {INDEX} names {other!r}; expected safetensors files")
        return files
    found = [name for name in names if name.endswith(SAFETENSORS)]
    if len(found) != 1:
        raise CheckpointError(f"{repository} has {len(found)} safetensors files and no {INDEX}; no others are read")
    return found


def check_upload(target: str, to: str) -> Repository:
    """Return the repository for the upload of a conversion, after checks that need no result of the conversion.

    Args:
      target: OWNER/NAME.
      to: the format of the conversion.

    Raises:
      ConfigError: the name is invalid, or the format is not one of `FORMATS`.
      InputError: there is no token, the Hub does not accept it, or cannot be reached.
    """
    repository = huggingface.parse(huggingface.PREFIX + target.removeprefix(huggingface.PREFIX))
    if repository.folder or repository.revision:
        raise ConfigError(f"--push {target}: expected OWNER/NAME")
    if to not in FORMATS:
        raise ConfigError(f"--push --to {to}: `dcvit.load` opens repositories with {', '.join(FORMATS)}")
    with huggingface.one_line_errors(repository, "upload to"):
        require(huggingface.LIBRARY).HfApi(library_name=huggingface.SENDER).whoami()
    return repository


def upload(folder: Path, repository: Repository, private: bool) -> Repository:
    """Upload a converted model, with its card, in one commit; return the repository with that commit.

    The repository is created if it does not exist. Weights and their descriptions that it has and the folder has not
    are removed in the same commit, because a library could open them instead. Only the files that the conversion wrote
    are uploaded.

    Args:
      folder: the result of a conversion.
      repository: see `check_upload`.
      private: create a private repository.

    Raises:
      ConfigError: the repository exists, and is public although `private`.
      CheckpointError: a file that the conversion wrote is missing, or is a link.
      InputError: the upload failed; the repository has no new commit.
    """
    written = [*checksums.files(folder, checksums.WEIGHTS), checksums.WEIGHTS, CARD]
    if wrong := [name for name in written if (folder / name).is_symlink() or not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / wrong[0]} is not the file that the conversion wrote; nothing is uploaded")
    api = require(huggingface.LIBRARY).HfApi(library_name=huggingface.SENDER)
    with huggingface.one_line_errors(repository, "upload to"):
        api.create_repo(repository.id, private=private or None, exist_ok=True)
        is_public = private and not api.model_info(repository.id).private
    if is_public:
        raise ConfigError(f"--private: {repository.id} exists and is public")
    with huggingface.one_line_errors(repository, "upload to"):
        there = api.list_repo_files(repository.id)
        stale = [name for name in there if name not in written and (name in DESCRIPTIONS or _is_weights(name))]
        commit = api.upload_folder(
            repo_id=repository.id, folder_path=folder, commit_message=f"Upload {folder.name} with dcvit",
            allow_patterns=written, delete_patterns=stale or None,
        )  # fmt: skip
    return repository._replace(revision=commit.oid)


def _is_weights(name: str) -> bool:
    return "/" not in name and (name.endswith(SAFETENSORS) or name in FILE_NAMES)
