"""Installs each extra alone into a new environment, and uses every optional part of the package there.

    python scripts/check_extras.py [--extras none,data,lm] [--no-constraints]
    python scripts/check_extras.py --sizes [--json docs/install.json]    (in an environment with all extras)

Prints a table: "works", or the extra that the command's error names. Fails if a part does not work with its extra, or
if its error without the extra is not one line that names it. "skypilot" is no extra: SkyPilot, which does not allow the
versions of constraints.txt, reads its launch file in an environment of its own. Installations take about ten minutes.
`--sizes` prints the table of docs/install.md instead: the packages that each extra brings, and their megabytes.
"""

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = (
    "none", "train", "data", "tiff", "lm", "eval", "gcs", "s3", "wandb", "torch", "interop", "docs", "skypilot",
)  # fmt: skip
TASK = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/colors.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [red, green]
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
SKYPILOT = """
import sky, yaml
with open("scripts/launch/skypilot.yaml") as file:
    task = sky.Task.from_yaml_config(yaml.safe_load(file), [("CONFIG", "vit_digits"), ("WORKDIR", "gs://bucket/run")])
(resources,) = task.resources
assert task.num_nodes == 2 and resources.use_spot, task
assert resources.job_recovery["recover_on_exit_codes"] == [75], resources
"""
SHORT = "--config.total_steps=2 --config.input.batch_size=4 --config.model.depth=1 --config.input.data.context=32"
# name of the part -> its extra, and the arguments of `dcvit` in a folder with the files of `prepare`
PARTS = {
    "digits": ("train", "train --config vit_digits:epochs=1,attention=mha --workdir run"),
    "embedded text": ("train", f"train --config lm_stdlib --workdir lm {SHORT}"),
    "images in folders": ("train", "train --config vit_folder:data_dir=images,val_fraction=0.5,variant=DCViT-mu/16,"
                          "res=32,batch_size=2,epochs=1 --workdir folder"),
    "TIFF of channels": ("tiff", "check-data --config vit_folder:data_dir=channels,val_fraction=0.5 "
                         "--config.input.pp=decode(2,dtype='uint16') --config.evals.val.pp=decode(2,dtype='uint16')"),
    "tfds": ("data", "check-data --config vit_i1k"),
    "Parquet": ("data", "check-data --config vit_i1k:data_dir=parquet"),
    "BPE tokenizer": ("lm", "train --config lm_text:data_dir=text,tokenizer=train,vocab_size=300 --workdir bpe "
                      f"{SHORT}"),
    "zstd": ("lm", f"train --config lm_text:data_dir=zstd --workdir zst {SHORT}"),
    "lm_eval": ("eval", "lm_eval --model text --tasks colors --include_path tasks"),
    "gs://": ("gcs", "evaluate --workdir gs://dcvit-does-not-exist/run"),
    "s3://": ("s3", "evaluate --workdir s3://dcvit-does-not-exist/run"),
    "W&B": ("wandb", "train --config vit_digits:epochs=1 --workdir wb --config.total_steps=2 "
            "--config.wandb.mode=offline --config.wandb.project=p"),
    "PyTorch, timm": ("interop", "convert run timm --to timm"),
    "ONNX": ("interop", "convert run onnx --to onnx"),
}  # fmt: skip
# Errors of a part that works, which has no data or no server here.
EXPECTED = {
    "Parquet": "no folder parquet",
    "tfds": r"not prepared|not found|no dataset|download",
    "gs://": r"gs://dcvit-does-not-exist/run(?!.*needs gcsfs)",
    "s3://": r"s3://dcvit-does-not-exist/run(?!.*needs s3fs)",
}


def run(command, **options):
    """Run a command; return its status and its output."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    return done.returncode, done.stdout


def prepare(folder):
    """Write the files that the parts read."""
    for label, name in (("four", "a"), ("four", "b"), ("seven", "a"), ("seven", "b")):
        path = folder / "images" / label / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / "tests" / "data" / f"{label}.png").read_bytes())
    # A TIFF of 4×4 pixels of two channels of 16 bits, in one strip after the header.
    tags = ((256, 4), (257, 4), (258, 16), (259, 1), (262, 1), (273, 8), (277, 2), (278, 4), (279, 64))
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    tiff = struct.pack("<2sHI", b"II", 42, 72) + bytes(64) + struct.pack("<H", len(tags)) + entries + bytes(4)
    for name in ("a", "b"):
        path = folder / "channels" / "land" / f"{name}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tiff)
    for name in ("text", "zstd", "tasks"):
        (folder / name).mkdir()
    text = Path(__file__).read_text() * 8
    (folder / "text" / "a.txt").write_text(text)
    # A frame of zstd with one raw block, so that no library is needed to write it: RFC 8878, section 3.1.1.
    line = json.dumps({"text": text[:60_000]}).encode() + b"\n"
    header = b"\x28\xb5\x2f\xfd\xa0" + len(line).to_bytes(4, "little")
    (folder / "zstd" / "a.jsonl.zst").write_bytes(header + (len(line) << 3 | 1).to_bytes(3, "little") + line)
    (folder / "tasks" / "colors.yaml").write_text(TASK.replace("FOLDER", str(folder / "tasks")))
    questions = [{"question": "grass is", "label": 1}, {"question": "blood is", "label": 0}]
    (folder / "tasks" / "colors.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))


def use(part, python, folder, installed):
    """Use one part; return a cell of the table, and whether it is as it should be."""
    extra, words = PARTS[part]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "NO_GCE_CHECK": "true"}
    status, output = run([python, "-m", "dcvit", *words.split()], cwd=folder, env=environment, timeout=900)
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    named = re.search(r"dcvit\[(\w+)\]", lines[0]) if len(lines) == 1 else None
    if named and status == 2:
        expected = "train" if installed in ("none", "torch") else extra  # all others include it
        return f"needs [{named[1]}]", named[1] != installed and named[1] in (expected, extra)
    if status == 0 or (part in EXPECTED and lines and re.search(EXPECTED[part], lines[0])):
        return "works", True
    print(f"\n{part} with [{installed}]: status {status}\n{output[-2000:]}", file=sys.stderr)
    return "**fails**", False


def install(folder, constraints, *packages):
    """Install packages into a new environment in a folder; return its Python."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, *constraints, *packages], check=True)
    return python


def closure(requirement, project, found):
    """Add the installed packages that a requirement brings to `found`, by name and extra; None is a missing one."""
    for extra in ("", *sorted(requirement.extras)):
        if (key := (requirement.name.lower().replace("_", "-"), extra)) in found:
            continue
        try:
            found[key] = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            found[key] = None
            continue
        needed = found[key].requires or ()
        if requirement.name == "dcvit":  # an editable installation may have the requirements of another commit
            needed = project["optional-dependencies"][extra] if extra else project["dependencies"]
        for one in map(Requirement, needed):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                closure(one, project, found)


def sizes(out):
    """Print what each extra brings: packages and MB in this environment, "–" if a package is missing; write JSON."""
    project, rows = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], []
    for extra in ("", *project["optional-dependencies"]):
        found = {}
        closure(Requirement(f"dcvit[{extra}]" if extra else "dcvit"), project, found)
        packages = {name: distribution for (name, _), distribution in found.items()}
        row = {"extra": f"`{extra}`" if extra else "none", "packages": "–", "MB": "–"}
        if None not in packages.values():
            files = [file.locate() for one in packages.values() for file in one.files or () if file.suffix != ".pyc"]
            total = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
            row |= {"packages": len(packages), "MB": round(total / 10) * 10}
        rows.append(row)
    for line in ([*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)):
        print("| " + " | ".join(map(str, line)) + " |")
    if out:
        out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def check(installed, folder, constraints):
    """Install one extra and use all parts; return the cells of its column, and whether all are right."""
    package = {"none": str(ROOT), "skypilot": "skypilot>=0.12"}.get(installed, f"{ROOT}[{installed}]")
    python = install(folder, [] if installed == "skypilot" else constraints, package)
    if installed == "skypilot":
        status, output = run([python, "-c", SKYPILOT], cwd=ROOT, env={**os.environ, "HOME": str(folder)})
        print(output, file=sys.stderr, end="")
        return {"skypilot.yaml": "works" if status == 0 else "**fails**"}, status == 0
    prepare(folder)
    cells = {part: use(part, python, folder, installed) for part in PARTS}
    if installed == "none":
        status, output = run([python, ROOT / "scripts" / "check_core.py"], cwd=folder)
        print(output, file=sys.stderr, end="")
        cells["core"] = ("works", True) if status == 0 else ("**fails**", False)
    if installed == "docs":
        out = ["--fail-on-warning", "--keep-going", "--quiet", ROOT / "docs", folder / "html"]
        status, output = run([python, "-m", "sphinx", *out], env={**os.environ, "JAX_PLATFORMS": "cpu"})
        print(output, file=sys.stderr, end="")
        cells["documentation"] = ("works", True) if status == 0 else ("**fails**", False)
    return {part: cell for part, (cell, _) in cells.items()}, all(right for _, right in cells.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extras", default=",".join(EXTRAS), help="comma-separated, by default all")
    parser.add_argument("--no-constraints", action="store_true", help="install the newest releases")
    parser.add_argument("--sizes", action="store_true", help="print the size of each extra instead")
    parser.add_argument("--json", type=Path, help="with --sizes: file for the table")
    args = parser.parse_args()
    constraints = [] if args.no_constraints else ["--constraint", ROOT / "constraints.txt"]
    if args.sizes:
        sizes(args.json)
        return 0
    columns, right = {}, True
    for extra in args.extras.split(","):
        with tempfile.TemporaryDirectory() as folder:
            columns[extra], found = check(extra, Path(folder), constraints)
            right &= found
            print(f"{extra}: {columns[extra]}", flush=True)
    print("\n| part | " + " | ".join(f"`[{extra}]`" for extra in columns) + " |\n|---|" + "---|" * len(columns))
    for part in ("core", *PARTS, "documentation", "skypilot.yaml"):
        print(f"| {part} | " + " | ".join(cells.get(part, "–") for cells in columns.values()) + " |")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
