"""What is misspelt, a key, a value, an option or a command, is refused before anything compiles or is written, and the
right spelling is suggested.
"""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from conftest import TINY

from dcvit.__main__ import dispatch
from dcvit.cli import run

SUGGESTED = 0.9  # the share of the table whose message has the right spelling

TINY_LM = {
    "tensorboard": False, "total_steps": 2, "model.width": 16, "model.depth": 1, "model.num_heads": 2,
    "model.mlp_dim": 16, "input.batch_size": 8, "schedule.warmup_percent": 0,
}  # fmt: skip

Argv = Callable[[Path], list[str]]  # from the workdir to a command line


def train(*options: str, config: str = "vit_digits") -> Argv:
    """A training with these options beside --config and --workdir."""
    return lambda workdir: ["train", "--config", config, "--workdir", str(workdir), *options]


def vit(key: str, value: Any = 1) -> Argv:
    """A training of images with an override."""
    return train(*(f"--config.{k}={v}" for k, v in {**TINY, key: value}.items()))


def lm(key: str, value: Any = 1) -> Argv:
    """A training on text with an override."""
    return train(*(f"--config.{k}={v}" for k, v in {**TINY_LM, key: value}.items()), config="lm_stdlib")


def words(*argv: str) -> Argv:
    """A command line as it stands."""
    return lambda workdir: list(argv)


MISSPELT: dict[str, tuple[Argv, str]] = {  # name -> command line, the right spelling
    # Configs and their arguments.
    "vit_digit": (train(config="vit_digit"), "vit_digits"),
    "lm_stdlb": (train(config="lm_stdlb"), "lm_stdlib"),
    ":atention=mha": (train(config="vit_digits:atention=mha"), "attention"),
    ":epoch=3": (train(config="vit_digits:epoch=3"), "epochs"),
    ":step=3": (train(config="lm_stdlib:step=3"), "steps"),
    ":attention=mah": (train(config="vit_digits:attention=mah"), "mha"),
    ":varaint=ViT-S/16": (train(config="vit_i1k:varaint=ViT-S/16"), "variant"),
    ":datadir=x": (train(config="vit_folder:datadir=x"), "data_dir"),
    # Keys at the top.
    "total_epoch": (vit("total_epoch"), "total_epochs"),
    "totalsteps": (vit("totalsteps"), "total_steps"),
    "log_step": (vit("log_step"), "log_steps"),
    "checkpoint_steps": (vit("checkpoint_steps"), "ckpt_steps"),
    "lrr": (vit("lrr"), "lr"),
    "wdd": (vit("wdd"), "wd"),
    "optx_name": (vit("optx_name", "scale_by_adam"), "optax_name"),
    "labelsmoothing": (vit("labelsmoothing", 0.1), "label_smoothing"),
    "grad_clip": (vit("grad_clip", 1.0), "grad_clip_norm"),
    "ema_deacy": (vit("ema_deacy", 0.9), "ema_decay"),
    "mix_up": (vit("mix_up", 0.2), "mixup"),
    "sharding_stratgy": (vit("sharding_stratgy", "ddp"), "sharding_strategy"),
    "sed": (vit("sed"), "seed"),
    "loss_chunks": (lm("loss_chunks", 8), "loss_chunk"),
    "vocabsize": (lm("vocabsize", 257), "vocab_size"),
    # Keys inside others.
    "modle.width": (vit("modle.width"), "model"),
    "model.widht": (vit("model.widht"), "width"),
    "model.num_head": (vit("model.num_head"), "num_heads"),
    "model.pooltype": (vit("model.pooltype", "gap"), "pool_type"),
    "model.qk_nrom": (vit("model.qk_nrom", "rmsnorm"), "qk_norm"),
    "model.rotary_fractoin": (lm("model.rotary_fractoin", 0.5), "rotary_fraction"),
    "model.window_patern": (lm("model.window_patern", "1:1"), "window_pattern"),
    "optax.beta1": (vit("optax.beta1", 0.9), "b1"),
    "optax.mu_dtpye": (vit("optax.mu_dtpye", "bfloat16"), "mu_dtype"),
    "schedule.warmup_step": (vit("schedule.warmup_step"), "warmup_steps"),
    "schedule.decay_typ": (vit("schedule.decay_typ", "cosine"), "decay_type"),
    "schedule.time_scale": (vit("schedule.time_scale", 100), "timescale"),
    "input.batchsize": (vit("input.batchsize", 64), "batch_size"),
    "inptu.batch_size": (vit("inptu.batch_size", 64), "input"),
    "input.date.kind": (vit("input.date.kind", "digits"), "data"),
    "input.data.spilt": (vit("input.data.spilt", "train"), "split"),
    "input.data.cahce": (vit("input.data.cahce", True), "cache"),
    "input.data.contxt": (lm("input.data.contxt", 16), "context"),
    "evals.tset.pp": (vit("evals.tset.pp", ""), "test"),
    "evals.test.batchsize": (vit("evals.test.batchsize"), "batch_size"),
    "evals.test.log_step": (vit("evals.test.log_step"), "log_steps"),
    "evals.validation.data.limt": (lm("evals.validation.data.limt", 16), "limit"),
    # Values that are names.
    "model_name=vitt": (vit("model_name", "vitt"), "vit"),
    "variant=DCViT-Tii/16": (vit("model.variant", "DCViT-Tii/16"), "Ti"),
    "preset=DCFormer+-405M": (lm("model.preset", "DCFormer+-405M"), "DCFormer++-405M"),
    "preset=Pythia-2.8": (lm("model.preset", "Pythia-2.8"), "Pythia-2.8B"),
    "compose=bth": (vit("model.compose", "bth"), "both"),
    "branches=kq": (vit("model.branches", "kq"), "qk"),
    "posemb=sincos": (vit("model.posemb", "sincos"), "sincos2d"),
    "pool_type=gpa": (vit("model.pool_type", "gpa"), "gap"),
    "qk_norm=layer_norm": (vit("model.qk_norm", "layer_norm"), "layernorm"),
    "remat=ful": (vit("model.remat", "ful"), "full"),
    "dtype_mm=bfloat": (vit("model.dtype_mm", "bfloat"), "bfloat16"),
    "implementation=refrence": (vit("model.implementation", "refrence"), "reference"),
    "position=rotry": (lm("model.position", "rotry"), "rotary"),
    "mlp=swigl": (lm("model.mlp", "swigl"), "swiglu"),
    "loss=softmax": (vit("loss", "softmax"), "softmax_xent"),
    "loss=sigmoid_xnet": (vit("loss", "sigmoid_xnet"), "sigmoid_xent"),
    "optax_name=scale_by_adamm": (vit("optax_name", "scale_by_adamm"), "scale_by_adam"),
    "optax_name=adam": (vit("optax_name", "adam"), "scale_by_adam"),
    "mu_dtype=bfloat17": (vit("optax.mu_dtype", "bfloat17"), "bfloat16"),
    "decay_type=cosin": (vit("schedule.decay_type", "cosin"), "cosine"),
    "pp=flip": (vit("input.pp", "flip"), "flip_lr"),
    "pp=value_rang": (vit("evals.test.pp", "value_rang(-1, 1)"), "value_range"),
    "pp argument": (vit("input.pp", "value_range(vmni=-1)"), "vmin"),
    "evaluator=clasification": (vit("evals.test.type", "clasification"), "classification"),
    "evaluator=perplexty": (lm("evals.validation.type", "perplexty"), "perplexity"),
    "kind=digit": (vit("input.data.kind", "digit"), "digits"),
    "kind=megatro": (lm("input.data", {"kind": "megatro"}), "megatron"),
    "split=trian": (vit("input.data.split", "trian"), "train"),
    "split=validaton": (lm("evals.validation.data.split", "validaton"), "validation"),
    "sharding_strategy=fspd": (vit("sharding_strategy", "fspd"), "fsdp"),
    "sharding_strategy=fsdp+tensr": (vit("sharding_strategy", "fsdp+tensr"), "fsdp+tensor"),
    "mesh axis": (vit("mesh", [("dta", -1)]), "data"),
    "corrupt=skp": (vit("input.corrupt", "skp"), "skip"),
    "on_corrupt=previos": (vit("on_corrupt", "previos"), "previous"),
    "ckpt_best of an evaluation": (vit("ckpt_best", ("tset/top1", "max")), "test"),
    "ckpt_best of a metric": (vit("ckpt_best", ("test/topp1", "max")), "test/top1"),
    "ckpt_best the most": (vit("ckpt_best", ("test/top1", "mxa")), "max"),
    "frozen parameter": (vit("frozen", ["heda/.*"]), "head"),
    # Options and commands.
    "--wrokdir": (words("train", "--config", "vit_digits", "--wrokdir", "w"), "did you mean '--workdir'"),
    "--confg": (lambda w: ["train", "--confg", "vit_digits", "--workdir", str(w)], "did you mean '--config'"),
    "--confg.lr": (train("--confg.lr=1"), "--config"),
    "--acept": (train("--acept", "lr"), "--accept"),
    "--accept sede": (train("--accept", "sede"), "seed"),
    "--accept optax_nam": (train("--accept", "optax_nam"), "optax_name"),
    "--num_proceses": (train("--num_proceses", "2"), "--num_processes"),
    "evaluate --chekpoint": (words("evaluate", "--workdir", "w", "--chekpoint", "c"), "--checkpoint"),
    "evaluate --format tabel": (words("evaluate", "--workdir", "w", "--format", "tabel"), "'table'"),
    "predict --topK": (words("predict", "--workdir", "w", "a.png", "--topK", "3"), "--topk"),
    "predict --formt": (words("predict", "--workdir", "w", "a.png", "--formt", "csv"), "--format"),
    "generate --temprature": (words("generate", "--workdir", "w", "--temprature", "1"), "--temperature"),
    "generate --promt": (words("generate", "--workdir", "w", "--promt", "x"), "--prompt"),
    "generate --max_tokens": (words("generate", "--workdir", "w", "--max_tokens", "3"), "--tokens"),
    "plot --ouput": (words("plot", "w", "--ouput", "c.png"), "--out"),
    "tokenize --tokenzier": (words("tokenize", "--data", "d", "--out", "o", "--tokenzier", "t"), "--tokenizer"),
    "trian": (words("trian"), "train"),
    "evalute": (words("evalute"), "evaluate"),
    "pridict": (words("pridict"), "predict"),
    "genrate": (words("genrate"), "generate"),
    "tokenise": (words("tokenise"), "tokenize"),
}


class Refusal(NamedTuple):
    """What became of a command line."""

    status: int
    err: str
    compiled: list[str]
    begun: bool  # whether the workdir is there


@pytest.fixture(scope="module")
def compiled():
    """The names of what XLA has compiled, or got from JAX's cache on disk, since; it grows."""
    found: list[str] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def refused(compiled, tmp_path_factory):
    """Each refusal by name."""
    folder = tmp_path_factory.mktemp("misspelt")
    found = {}
    with jax.numpy_dtype_promotion("standard"):
        for i, (name, (argv, _)) in enumerate(MISSPELT.items()):
            workdir, err, before = folder / str(i), io.StringIO(), len(compiled)
            with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
                status = run(dispatch, argv(workdir))
            found[name] = Refusal(status, err.getvalue(), compiled[before:], workdir.exists())
    return found


def test_compilations_are_seen(compiled):
    before = len(compiled)
    jax.jit(lambda x: jnp.sin(x) + 41)(jnp.ones(3)).block_until_ready()
    assert len(compiled) > before


@pytest.mark.parametrize("name", MISSPELT)
def test_what_is_misspelt_is_refused_in_one_line_before_anything_compiles(refused, name):
    refusal = refused[name]
    assert refusal.status == 2
    assert refusal.err.startswith("error: ")
    assert refusal.err.count("\n") == 1
    assert refusal.compiled == []
    assert not refusal.begun


def test_the_right_spelling_is_suggested(refused):
    def suggested(name: str) -> bool:
        """Whether the right spelling stands there as a word of its own."""
        return re.search(rf"(?<![\w+-]){re.escape(MISSPELT[name][1])}(?![\w+-])", refused[name].err) is not None

    lacking = {name: refused[name].err for name in MISSPELT if not suggested(name)}
    assert len(MISSPELT) >= 36
    assert 1 - len(lacking) / len(MISSPELT) >= SUGGESTED, lacking
