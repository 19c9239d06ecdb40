"""Uses an installation without extras: the layer, the models and `dcvit.load` work, and the rest names `dcvit[train]`.

    python scripts/check_core.py [--without MODULE,…] [--parts layers,load,errors] [MODEL …]

`.ci/run wheel` runs it with a wheel in a new environment, and `scripts/check_extras.py` with the source. `--without`
hides modules of a complete environment, to use it like such a one. Each MODEL is opened, too.
"""

import argparse
import contextlib
import importlib.util
import io
import runpy
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np

import dcvit

LIBRARIES = ("PIL", "matplotlib", "sklearn")  # of the extra, which neither jax nor flax brings
LINE = 'this needs {}, which is not installed: pip install "dcvit[train]"\n'
NEEDING = (  # commands that need the extra
    "train --config vit_digits --workdir run",
    "train --config lm_synthetic --workdir run",
    "evaluate --workdir digits",
    "predict --model digits image.png",
    "convert digits out --to hf",
    "explore --model tasks --prompt wolf",
    "compare run",
    "check-data --config vit_digits",
    "aot --config vit_digits --topology v5e:2x2",
)


def check_layers():
    """Run the layers, attention on arrays and the models, and differentiate a layer."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from dcvit.dcmha import ComposeWeights, attention
    from dcvit.models import dcmha_nnx, lm, vit

    @jax.jit
    def results(x, image, tokens):
        layer = dcvit.DCMHA(num_heads=4)
        variables = layer.init(jax.random.key(1), x)
        gradients = jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(variables)
        block = dcmha_nnx.DCMHA(4, 16, rngs=nnx.Rngs(0))(x, decode=False)
        q = x.reshape(2, 6, 4, 4)
        static = ComposeWeights(static=jnp.zeros((1, 4, 4)))  # A' = A + 0
        nets = {vit.Model(10, variant="DCViT-mu/8", depth=1): image}
        nets[lm.Model(256, depth=1, width=16, num_heads=2, context=8)] = tokens
        logits = [net.init_with_output(jax.random.key(0), inputs)[0][0] for net, inputs in nets.items()]
        return gradients, block, attention(q, q, q, static, static) - attention(q, q, q), logits

    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    found = results(x, jnp.zeros((1, 16, 16, 3)), jnp.zeros((1, 8), jnp.int32))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert jnp.abs(found[2]).max() < 1e-6
    assert "DCViT-S" in dcvit.list_presets()


def check_load(models):
    """Open models of the package, an .npz file with the names of big_vision, and the given models."""
    import jax
    from flax.traverse_util import flatten_dict

    from dcvit.models import vit

    model = dcvit.load("digits")
    assert len(model.predict(np.zeros((2, 8, 8, 1), np.float32), topk=2)[1]) == 2
    assert dcvit.load("text").generate("def main(", tokens=4)
    np.savez("digits.npz", **flatten_dict({"params": model.params}, sep="/"))
    loaded = vit.load(jax.tree.map(np.zeros_like, model.params), "digits.npz", {})
    jax.tree.map(np.testing.assert_array_equal, loaded, model.params)
    for path in models:
        assert dcvit.load(path).params


def run(words):
    """Run `python -m dcvit WORDS` in this process; return the exit status, and what it printed on stderr."""
    sys.argv, printed = ["dcvit", *words.split()], io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module("dcvit", run_name="__main__")
        except SystemExit as e:
            return e.code, printed.getvalue()


def check_errors(missing):
    """Use what needs the extra: one line names it, with status 2 or as an exception. Other commands work."""
    import input_pipeline

    def error_of(call):
        try:
            return f"works: {call()}"
        except input_pipeline.MissingLibraryError as e:
            return f"error: {e}\n"

    lines = {f"error: {LINE.format(name)}" for name in missing}
    for words in NEEDING:
        status, printed = run(words)
        assert (status, printed in lines) == (2, True), (words, status, printed)
    for words in ("--version", "--help", "help config", "help train", "generate --model text --prompt def --tokens 2"):
        status, printed = run(words)
        assert (status, "Warning" in printed) == (0, False), (words, status, printed)
    model = dcvit.load("digits")
    for call in (
        lambda: importlib.import_module("dcvit.training").train("vit_digits", "run"),
        lambda: model.predict("image.png"),
        lambda: model.predict(np.zeros((8, 8), np.uint8)),
        lambda: input_pipeline.open_source("digits"),
        lambda: input_pipeline.Preprocess("decode")({"image": Path("image.png").read_bytes()}, None),
    ):
        assert error_of(call) in lines, error_of(call)


def hide(names):
    """Let Python not find modules, as if they were not installed."""

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in names else super().find_spec(name, path, target)

    sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--without", default="", help="modules to hide")
    parser.add_argument("--parts", default="layers,load,errors", help="by default, all")
    parser.add_argument("models", nargs="*", type=lambda path: str(Path(path).absolute()), help="models to open")
    args = parser.parse_args()
    hide(args.without.split(","))
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    assert missing == [*LIBRARIES], f"not an installation of the core: only {missing} are missing"
    parts = {"layers": check_layers, "load": lambda: check_load(args.models), "errors": lambda: check_errors(missing)}
    dcvit.quiet()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("image.png").write_bytes(b"\x89PNG")
        for part in args.parts.split(","):
            parts[part]()
    print("the core works, and names dcvit[train] where it is needed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
