"""Rules for imports, read from the source, and imports in an environment with few libraries."""

import ast
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dcvit import __main__ as entry
from input_pipeline import optional

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Layers from the top: a module imports from its own layer or from lower ones. Each name is a folder or a module.
COMMANDS = [*(name.replace("-", "_") for name in entry.COMMANDS), "__main__"]
LAYERS = [
    [*(f"dcvit.{command}" for command in COMMANDS), "dcvit.cli"],
    ["dcvit.pages"],
    ["dcvit.training"],
    ["dcvit.interpret", "dcvit.inference", "dcvit.evaluators"],
    ["dcvit.hub"],
    ["dcvit.weights", "dcvit.runs"],
    ["dcvit.models"],
    ["dcvit.parallel", "dcvit.config"],
    ["dcvit.dcmha", "input_pipeline", "dcvit.errors", "dcvit.process", "dcvit.versions"],
]
# Module -> what its functions import from a higher layer.
UPWARDS = {
    "dcvit": ("dcvit",),  # `dcvit.load` is the entrance to the package
    "dcvit.models.vit": ("dcvit.hub.source",),  # big_vision's contract: a model loads its own checkpoints
    "dcvit.models.lm": ("dcvit.hub.source",),
    "dcvit.config.load": ("dcvit.hub.source",),  # a config starts from the model that `init` names
}


def trees():
    """Every module of the two packages, parsed."""
    paths = [*ROOT.glob("dcvit/**/*.py"), *ROOT.glob("input_pipeline/**/*.py")]
    name = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    return {name[path]: ast.parse(path.read_text()) for path in paths}


def imports(nodes):
    """The modules that nodes of a syntax tree import, and what they import from them."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_at_run_time(tree):
    """The same of a module, without what only type checkers import."""
    checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {inner for node in checked for statement in node.body for inner in ast.walk(statement)}
    return imports(node for node in ast.walk(tree) if node not in skipped)


TREES = trees()
MODULES = {name: imports(ast.walk(tree)) for name, tree in TREES.items()}


def roots(name):
    return {imported.split(".")[0] for imported in MODULES[name]}


def layer(name):
    """The number of the layer whose folder or module holds `name`; the longest match counts."""
    found = [(len(n), i) for i, names in enumerate(LAYERS) for n in names if name == n or name.startswith(n + ".")]
    return max(found)[1] if found else None


def test_imports_point_downwards():
    for name in MODULES:
        assert layer(name) is not None or name == "dcvit", f"{name} is in no layer"
        for imported in MODULES[name]:
            if layer(imported) is not None and not imported.startswith(UPWARDS.get(name, ())):
                assert layer(imported) >= layer(name), f"{name} imports {imported} from a higher layer"
        assert not roots(name) & {"scripts", "configs", "tests"}, name


def test_the_folders_and_the_imports_between_them_stay_few():
    """A reader can hold them in mind; all commands count as one folder."""

    def folder(name):
        first = name.split(".")[:2] if name.startswith("dcvit.") else name.split(".")[:1]
        return "commands" if first[-1] in COMMANDS else ".".join(first)

    pairs = {
        (folder(name), folder(imported)) for name in MODULES for imported in MODULES[name] & MODULES.keys() - {"dcvit"}
    }
    assert len({folder(name) for name in MODULES}) <= 20
    assert len({pair for pair in pairs if pair[0] != pair[1]}) <= 110


def test_every_imported_library_is_declared():
    """Not only brought by another one, which may stop to need it."""
    declared = {
        re.match(r"[\w.-]+", need)[0].lower().replace("_", "-")
        for needs in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
        for need in needs
    }
    packages = importlib.metadata.packages_distributions()
    imported = {root for name in MODULES for root in roots(name)} - {
        *sys.stdlib_module_names,
        "dcvit",
        "input_pipeline",
    }
    undeclared = {
        name for name in imported
        if not {d.lower().replace("_", "-") for d in packages.get(name, [name])} & declared
    }  # fmt: skip
    assert undeclared <= {"jaxlib"}  # jax requires the version that fits


def test_imports_have_no_cycle():
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for imported in {i for i in MODULES[name] if not i.startswith(UPWARDS.get(name, ()))}:
                if imported in MODULES and imported != name and not name.startswith(imported + "."):
                    visit(imported, [*path, name])
            done.add(name)

    for name in MODULES:
        visit(name, [])


def test_the_core_imports_jax_and_numpy_only():
    for name in (n for n in MODULES if n.startswith("dcvit.dcmha")):
        outside = roots(name) - set(sys.stdlib_module_names) - {"dcvit"}
        assert outside <= {"jax", "numpy", "jaxtyping"}, name
        own = [i for i in MODULES[name] if i.startswith("dcvit.")]
        assert all(i.startswith(("dcvit.dcmha", "dcvit.versions")) for i in own), name


def test_private_names_of_libraries_are_in_one_module():
    private = {(name, i) for name in MODULES for i in MODULES[name] if re.search(r"\._(?!_)|^jaxlib", i)}
    assert {name for name, imported in private if not imported.startswith(name)} == {"dcvit.versions"}, private


def test_input_pipeline_does_not_import_jax():
    for name in (n for n in MODULES if n.startswith("input_pipeline")):
        assert not roots(name) & {"jax", "flax", "optax", "dcvit", "orbax"}, name


def test_configs_import_ml_collections_names_of_attention_and_configs_of_runs_only():
    for path in ROOT.glob("configs/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Import), path
            if isinstance(node, ast.ImportFrom):
                assert node.module in ("ml_collections", "dcvit.models.head_settings", "dcvit.hub.source"), path


def requirements(*names):
    """The distributions `names` and all their requirements."""
    found, todo = set(), list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        todo += [re.match(r"[\w.-]+", need).group() for need in needs if "extra ==" not in need]
    return found


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import jax, jax.numpy as jnp
import dcvit, dcvit.dcmha, dcvit.models.vit as vit
net = vit.Model(10, variant="DCViT-mu/8", depth=1)
jax.eval_shape(net.init_with_output, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
print(sorted(m for m in sys.modules if m in {blocked}))
"""


def modules_outside(allowed):
    """The installed modules of other distributions than `allowed`."""
    return {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", d).lower() in allowed for d in distributions)
        and module != "dcvit"
        and not module.startswith("_")
    }


@pytest.mark.slow
def test_core_and_models_need_only_jax_flax_and_numpy():
    allowed = requirements("jax", "flax", "numpy")
    assert "tensorflow" not in allowed
    blocked = modules_outside(allowed)
    assert {"ml_collections", "sklearn", "jaxtyping", "PIL"} <= blocked
    process = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked - {"input_pipeline"})],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "[]"


@pytest.mark.exhaustive
def test_an_installation_without_extras_names_the_extra_that_is_needed():
    """`.ci/run wheel` runs all of the script in such an environment."""
    core = requirements(*(re.match(r"[\w.-]+", need)[0] for need in PROJECT["dependencies"]))
    hidden = ",".join(modules_outside(core) - {"input_pipeline"})
    words = [sys.executable, ROOT / "scripts" / "check_core.py", "--without", hidden, "--parts", "errors"]
    process = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


NEEDS_TRAIN = ("dcvit.training", "dcvit.pages", "dcvit.weights.export")


@functools.cache
def needs_train(name):
    """True for a module that `require_extra` guards: its own package does, or all that import it are guarded."""
    if name.startswith(NEEDS_TRAIN):
        return True
    users = [user for user in MODULES if name in MODULES[user] and user != name]
    return bool(users) and all(map(needs_train, users))


def test_libraries_of_training_are_imported_late_or_after_a_check_of_the_extra():
    """Without `[train]`, each use of them is an error that names it: by `Late`, `require` or `require_extra`."""
    libraries = {library for library, extra in optional.EXTRAS.items() if extra == "train"}
    for name in {*MODULES} - {"dcvit.versions"}:  # which imports for the module that calls it
        imported = {each.partition(".")[0] for each in imports_at_run_time(TREES[name])}
        assert not imported & libraries or needs_train(name), f"{name} imports {imported & libraries}"
    for folder in NEEDS_TRAIN:
        lines = (ROOT / folder.replace(".", "/") / "__init__.py").read_text().splitlines()
        assert {'require_extra("train")', 'require_extra("train", FROM_FLAX)'} & {*lines}, folder


def test_errors_name_the_extra_that_has_the_library():
    distributions = importlib.metadata.packages_distributions()
    for library, extra in optional.EXTRAS.items():
        if library in distributions:
            needs = " ".join(PROJECT["optional-dependencies"][extra]).lower().replace("_", "-")
            assert any(d.lower().replace("_", "-") in needs for d in distributions[library]), library


STATE = """
import importlib, logging, os, signal, sys, threading, warnings
import jax.experimental.pallas.mosaic_gpu, flax.linen, orbax.checkpoint, {others}

def state():
    loggers = [logging.root, *map(logging.getLogger, ["absl", "jax", "orbax", "asyncio", "py.warnings"])]
    return {{
        "loggers": [(each.level, each.propagate, [*each.handlers], [*each.filters]) for each in loggers],
        "warnings": [*warnings.filters],
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "threads": {{thread.name for thread in threading.enumerate()}},
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "environment": dict(os.environ),
    }}

before = state()
for name in {names}:
    importlib.import_module(name)
after = state()
print([key for key in before if before[key] != after[key]])
"""


@pytest.mark.exhaustive
def test_importing_the_package_changes_no_state_of_the_process():
    """Handlers, filters, hooks, threads, signals and the environment stay those of the user's program."""
    of_extras = re.compile(r"harness|modeling_dcvit|libraries")  # they import lm_eval and PyTorch, which change state
    names = sorted(name for name in MODULES if not of_extras.search(name))
    others = "matplotlib, scipy, sklearn, rich, tensorstore, PIL, optax, etils"
    script = STATE.format(names=names, others=others)
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "[]"
