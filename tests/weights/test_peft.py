"""Adapters of PEFT: those of a run give PEFT the logits of the run, those of PEFT give us its logits; invalid ones."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversion_models import tensors, write
from foreign_models import largest_difference, libraries, random_tokens, with_random_weights
from refusals import refused
from safetensors.numpy import load_file, save_file
from small_models import param_shapes, random_params

from dcvit import cli, convert, train
from dcvit.errors import CheckpointError
from dcvit.hub.saved import open_saved
from dcvit.models import lm
from dcvit.runs import checksums
from dcvit.weights import peft
from dcvit.weights.export import logits
from dcvit.weights.families import Weights, open_weights
from dcvit.weights.family import Description
from dcvit.weights.tensors import ADAPTER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("library_promotion"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT reads it of transformers
]
VOCAB, LENGTH = 257, 24  # bytes, and the token that ends a text
FIELDS = dict(width=32, depth=2, mlp_dim=48, num_heads=4, context=LENGTH)
FAMILIES = {
    "gpt2": dict(position="learned", norm="layernorm", mlp="gelu", use_bias=True, tied=True),
    "llama": dict(num_key_heads=2),
    "qwen3": dict(num_key_heads=2, qk_norm="rmsnorm", tied=True),
    "gpt_neox": dict(norm="layernorm", mlp="gelu", use_bias=True, parallel=True, rotary_fraction=0.5),
    "dcvit_hf": dict(compose="both"),
}
ALL = ".*/(query|key|value|out|in|gate)/kernel"
TARGETS = {"all": ALL, "some": ".*(query|value)/kernel|.*_1/.*/key/kernel|.*_0/MlpBlock_0/out/kernel"}


def make_base(family, folder):
    """Write a model of transformers with random weights and return its folder."""
    net = lm.Model(VOCAB, **FIELDS, **FAMILIES[family])
    params = random_params(param_shapes(net, jnp.zeros((1, 2), jnp.int32)))
    description = Description("lm", VOCAB, FIELDS | FAMILIES[family])
    return write(Weights(folder, "dcvit", description, tensors(params)), folder, "hf")


def adapt(base, workdir, *words, targets=ALL):
    """Train adapters of a base on text as the command does, with steps so large that they change the logits."""
    text = workdir.parent / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 60)
    options = ["wd=0.0", "lr=0.02", "total_steps=4", "input.batch_size=8", "tensorboard=False", "lora.rank=3"]
    options += [f"lora.targets={targets}", "lora.alpha=5.0", *words]
    argv = ["--config", f"lm_text:data_dir={text},init={base},val_fraction=0", "--workdir", str(workdir)]
    assert cli.run(train.main, [*argv, *(f"--config.{option}" for option in options)]) == 0
    return workdir


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A base of LLaMA's family, a run that adapts it, and the adapter of the run for PEFT."""
    root = tmp_path_factory.mktemp("peft")
    with jax.numpy_dtype_promotion("standard"):
        run = adapt(make_base("llama", root / "base"), root / "run")
        assert cli.run(convert.main, [str(run), str(root / "adapter"), "--to", "peft"]) == 0
    return root


def our_logits(path):
    return logits.compute(open_saved(path), random_tokens(VOCAB, LENGTH))


def their_logits(folder, adapter=None):
    """Return the logits of transformers for a folder, with an adapter by PEFT if one is given."""
    torch, transformers = libraries()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if adapter:
        peft_library = pytest.importorskip("peft", reason="needs PEFT; pip install -e .[interop]")
        model = peft_library.PeftModel.from_pretrained(model, adapter)
        assert not {name for name, p in model.named_parameters() if "lora_B" in name and not p.abs().max()}
    with torch.no_grad():
        return model.eval()(torch.from_numpy(random_tokens(VOCAB, LENGTH)).long()).logits.numpy()


@pytest.mark.interop
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "dcvit_hf"])
def test_merged_export_and_adapter_give_transformers_the_logits_of_the_run(family, targets, tmp_path, capsys):
    base = tmp_path / "base"  # with the files that transformers itself writes
    original = libraries()[1].AutoModelForCausalLM.from_pretrained(make_base(family, tmp_path / "ours"))
    original.config.eos_token_id = None  # defaults of transformers are no bytes
    original.save_pretrained(base)
    run = adapt(base, tmp_path / "run", targets=TARGETS[targets])
    capsys.readouterr()
    for to, library in (("hf", "transformers"), ("peft", "peft")):
        assert cli.run(convert.main, [str(run), str(tmp_path / to), "--to", to]) == 0
        assert f"result by {library}\n" in capsys.readouterr().out
    found = {"the run": our_logits(run), "its merged export in transformers": their_logits(tmp_path / "hf"),
             "its adapter in PEFT": their_logits(base, tmp_path / "peft"),
             "its adapter read back": our_logits(tmp_path / "peft")}  # fmt: skip
    assert largest_difference(their_logits(base), found["the run"]) > 0.3
    for name, x in found.items():
        difference = largest_difference(x, found["the run"])
        print(f"{family}, {targets}: {name}: {difference:.1e}, absolute {np.abs(x - found['the run']).max():.1e}")
        assert difference < 1e-5


@pytest.mark.interop
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "alpha_pattern": {"LAST": 7}, "rank_pattern": {"LAST": 2}}]
)
def test_adapters_of_peft_give_its_logits(family, options, tmp_path):
    _, transformers = libraries()
    peft_library = pytest.importorskip("peft", reason="needs PEFT; pip install -e .[interop]")
    modules = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "up_proj", "o_proj"],
               "gpt_neox": ["query_key_value", "dense", "dense_4h_to_h"]}[family]  # fmt: skip
    options = {k: {modules[-1]: x["LAST"]} if isinstance(x, dict) else x for k, x in options.items()}
    base = make_base(family, tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = dict(r=4, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2")
    model = peft_library.get_peft_model(model, peft_library.LoraConfig(**settings, **options))
    with_random_weights(model, 0.2).save_pretrained(tmp_path / "adapter")
    expected, found = their_logits(base, tmp_path / "adapter"), our_logits(tmp_path / "adapter")
    assert largest_difference(their_logits(base), expected) > 0.3
    assert largest_difference(found, expected) < 1e-5
    contradicting = edited(tmp_path / "adapter", tmp_path / "edited", fan_in_fan_out=family != "gpt2")
    assert largest_difference(our_logits(contradicting), expected) < 1e-5  # PEFT corrects it, too


def test_an_adapter_of_a_run_is_read_back_with_the_parameters_of_the_run(adapted):
    found, run = (dict(open_saved(adapted / name).read()) for name in ("adapter", "run"))
    assert found.keys() == run.keys()
    for name, x in found.items():
        np.testing.assert_allclose(x, run[name], atol=1e-6, err_msg=name)
    assert open_weights(adapted / "adapter").description == open_weights(adapted / "base").description


def test_a_module_of_several_kernels_has_blocks_and_the_sum_of_their_ranks(tmp_path):
    run = adapt(make_base("gpt_neox", tmp_path / "base"), tmp_path / "run", targets=TARGETS["some"])
    assert cli.run(convert.main, [str(run), str(tmp_path / "adapter"), "--to", "peft"]) == 0
    config = json.loads((tmp_path / "adapter" / ADAPTER).read_text())
    fused = [f"gpt_neox.layers.{i}.attention.query_key_value" for i in range(2)]
    assert config["rank_pattern"] == dict(zip(fused, (6, 9), strict=True))
    assert config["alpha_pattern"] == pytest.approx(dict(zip(fused, (10, 15), strict=True)))
    assert sorted(config["target_modules"]) == sorted([*fused, "gpt_neox.layers.0.mlp.dense_4h_to_h"])
    high = load_file(tmp_path / "adapter" / peft.FILE)[f"base_model.model.{fused[0]}.lora_B.weight"]
    per_head = high.reshape(FIELDS["num_heads"], 3, -1, 2, 3) != 0  # heads; query, key, value; D; adapters; rank
    assert per_head.any((0, 2, 4)).tolist() == [[True, False], [False, False], [False, True]]


def refusal(capsys, source, target):
    """Return the error of a conversion to PEFT, which is one line."""
    capsys.readouterr()
    assert cli.run(convert.main, [str(source), str(target), "--to", "peft"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    "case", ["no adapters", "a run without", "existing folder", "composition", "whole", "run", "adapter"]
)
def test_what_peft_cannot_hold_is_one_line(case, adapted, lm_workdir, tmp_path, capsys):
    source, target = adapted / "run", tmp_path / "out"

    def one_step(base, *words):
        return adapt(base, tmp_path / "run", "total_steps=1", *words, targets=".*/query/kernel")

    if case == "no adapters":
        source, message = adapted / "base", "has no adapters: --to peft needs a run with config.lora"
    elif case == "a run without":
        source, message = lm_workdir, "has no adapters: --to peft needs a run with config.lora"
    elif case == "existing folder":
        target, message = tmp_path, f"{tmp_path} exists; give a new path"
    elif case == "composition":
        source = one_step(make_base("dcvit_hf", tmp_path / "base"))
        message = "(dcvit_hf): --to peft needs gpt2, llama, gpt_neox"
    elif case == "whole":
        source = one_step(adapted / "base", "model_load.dont_load=['head/.*']")
        message = "trains head/kernel as a whole, but --to peft writes adapters only"
    else:
        source = one_step(lm_workdir if case == "run" else adapted / "adapter")
        message = f"({'dcvit' if case == 'run' else 'peft'}): --to peft needs gpt2, llama, gpt_neox"
    assert message in refusal(capsys, source, target)
    assert not (tmp_path / "out").exists()


def edited(adapter, target, change=None, **properties):
    """Return a copy of an adapter with changed tensors and properties."""
    shutil.copytree(adapter, target, ignore=shutil.ignore_patterns(checksums.WEIGHTS))
    config = json.loads((target / ADAPTER).read_text()) | properties
    (target / ADAPTER).write_text(json.dumps(config))
    if change:
        found = load_file(target / peft.FILE)
        change(found)
        save_file(found, target / peft.FILE)
    return target


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def as_dtype(dtype):
    return lambda t: t.update({f"{MODULE}.lora_A.weight": np.ones((3, 32), dtype)})


BAD = {
    "twice": (
        lambda t: t.update({k.removeprefix("base_model.model."): x for k, x in t.items() if MODULE in k}), {},
        f"{MODULE} and model.layers.0.self_attn.q_proj adapt the same model.layers.0.self_attn.q_proj.weight",
    ),
    "int8": (as_dtype(np.int8), {}, f"{MODULE}.lora_A.weight has numbers of int8; expected float32"),
    "bool alpha": (None, {"lora_alpha": True}, "lora_alpha=True of"),
    "word": (None, {"use_rslora": "false"}, "use_rslora='false' is not supported"),
    "module": (lambda t: t.update({k.replace("s.0", "s.7"): x for k, x in t.items()}), {}, "which its base lacks"),
    "factor": (lambda t: t.pop(f"{MODULE}.lora_B.weight"), {}, f"{MODULE}.lora_B.weight is missing, or no factor"),
    "shape": (lambda t: t.update({f"{MODULE}.lora_A.weight": np.ones((3, 5))}), {}, "factors of (3, 5) and (32, 3)"),
    "dora": (None, {"use_dora": True}, "use_dora=True is not supported"),
    "kind": (None, {"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
    "alpha": (None, {"lora_alpha": "8"}, "lora_alpha='8' of"),
    "huge alpha": (None, {"lora_alpha": 10**400}, "expected a number"),
    "no patterns": (None, {"alpha_pattern": ["q_proj"]}, "alpha_pattern=['q_proj']; expected names"),
    "pattern": (None, {"alpha_pattern": {"(q|k)_proj": 3}}, "alpha_pattern='(q|k)_proj' is not supported"),
    "base": (None, {"base_model_name_or_path": "meta/llama"}, "='meta/llama' is no folder of a model"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_or_unknown_adapter_is_one_line(name, adapted, tmp_path):
    change, properties, message = BAD[name]
    with refused(CheckpointError, message):
        dict(open_weights(edited(adapted / "adapter", tmp_path / "adapter", change, **properties)).read())


def test_a_merged_model_beside_its_adapter_opens_as_a_model(adapted, tmp_path):
    merged = shutil.copytree(adapted / "base", tmp_path / "merged")
    (merged / ADAPTER).write_text('{"base_model_name_or_path": "meta/llama"}')
    assert open_weights(merged).family == "llama"


def test_truncated_files_and_an_adapter_of_an_adapter_are_one_line(adapted, tmp_path, capsys):
    for file, content in ((peft.FILE, b"\x20"), (ADAPTER, b"[")):
        broken = edited(adapted / "adapter", tmp_path / file)
        (broken / file).write_bytes(content)
        assert file in refusal(capsys, broken, tmp_path / "out")
    looped = edited(adapted / "adapter", tmp_path / "looped", base_model_name_or_path=str(tmp_path / "looped"))
    assert "looped' is no folder of a model" in refusal(capsys, looped, tmp_path / "out")
