"""The PyTorch file computes the logits and gradients of the JAX models, decodes, trains, and is read back."""

import importlib.util
import json
import sys
import warnings

import conversion_models
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models
from conversion_models import open_saved
from marks import mostly_exhaustive

from dcvit.models import losses
from dcvit.weights import dcvit_hf
from dcvit.weights import links as linking

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch", reason="needs PyTorch; pip install -e .[interop]")
transformers = pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")
modeling = pytest.importorskip("dcvit.weights.modeling_dcvit", reason="needs transformers 5")

END = 3  # a token that ends a document
TEXT = {
    "both": {},
    "windows": dict(preset="DCFormer-405M", window_pattern="3:1", depth=4),
    "pythia": dict(preset="DCPythia-2.8B", prefill_window=4, compose_gelu="exact"),
    "groups": dict(static=True, groups=2, num_key_heads=2, rank=1),
    "folded": dict(preset="DCFlash-405M", num_key_heads=2, groups=2, static=True, end_of_text=END),
    "keys": dict(branches="k", compose="pre", qk_norm="layernorm"),
    "queries": dict(branches="q", compose="post", gate=False, mlp_groups=4),
    "gate": dict(projection=False, end_of_text=END),
    "plain": dict(compose=None, tied=True, end_of_text=END, qk_norm="layernorm"),
    "qwen": dict(window_pattern="1:0", qkv_bias="qkv", rotary_base=50.0, rotary_scaling=(8.0, 1.0, 4.0, 32)),
    "linear": dict(compose="pre", rotary_scaling=(2.5,), qkv_bias="qv", use_bias=True),
}
IMAGES = {
    "both": {},
    "map": dict(posemb="sincos2d", pool_type="map", static=True, groups=2),
    "tok": dict(pool_type="tok", rep_size=24, qk_norm="rmsnorm", compose="pre", norm_epsilon=1e-5),
    "plain": dict(pool_type="tok+gap", registers=3, layer_scale=0.1, mlp="swiglu", rep_size=24, compose=None),
    "folded": dict(pool_type="map", num_key_heads=2, groups=4, branches="q", static=True),
    "rotary": dict(posemb="rotary2d", pool_type="tok", registers=2, qkv_bias="qv", num_key_heads=2),
    "norms": dict(pool_type="tok", pre_norm=True, pool_norm=True, rep_size=24),
    "distilled": dict(pool_type="tok+reg", registers=2, rep_size=24),
    "first": dict(pool_type="0", mlp="gelu", branches="k", compose="post"),
}
LARGEST = 2e-5  # difference, in standard deviations of the logits


def to_torch(model, tmp_path):
    """Write the folder of a model and load it as a user does, without executing code of the folder."""
    folder = conversion_models.write(model, tmp_path / "hf", "hf")
    kind = dcvit_hf.IMAGE if model.description.model_name == "vit" else dcvit_hf.TEXT
    if not (folder / f"{dcvit_hf.MODULE}.py").exists():  # a native class could express the model
        pytest.fail("expected the modeling file")
    loaded, report = getattr(modeling, dcvit_hf.CLASSES[kind][dcvit_hf.AUTO[kind]]).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval(), folder


def make_tokens(net):
    tokens = np.array(small_models.make_tokens())
    if net.end_of_text is not None:
        tokens[:, 5] = net.end_of_text
    return tokens


def text_case(name, **more):
    fields = {**TEXT[name], **more}
    return conversion_models.language_model(fields.pop("preset", "DCFormer++-405M"), **fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(TEXT, "windows", "pythia", "groups", "folded", "queries", "qwen"))
def test_language_models_have_the_logits_of_jax_with_and_without_cache(name, tmp_path):
    net, params, model = text_case(name)
    theirs, _ = to_torch(model, tmp_path)
    tokens = make_tokens(net)
    expected = small_models.logits_of(net, params, tokens)
    rows = torch.from_numpy(tokens).long()
    with torch.no_grad():
        whole = theirs(rows).logits.numpy()
        cache, steps = None, []
        for part in [rows[:, :4], *rows[:, 4:].split(1, dim=1)]:
            out = theirs(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    scale = expected.std() * (3 if name == "windows" else 1)  # four layers, with the largest scores
    assert np.abs(whole - expected).max() < LARGEST * scale
    if net.prefill_window is None:  # with it, decoding differs from a whole row by design
        assert np.abs(torch.cat(steps, dim=1).numpy() - expected).max() < 1.5 * LARGEST * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(IMAGES, "map", "tok", "folded", "rotary", "norms"))
def test_image_models_have_the_logits_of_jax(name, tmp_path):
    shape = (16, 24, 3)
    net, params, model = conversion_models.image_model(shape, **IMAGES[name])
    theirs, _ = to_torch(model, tmp_path)
    assert theirs.config.image_size == list(shape[:2])
    images = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    expected = small_models.logits_of(net, params, images)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).logits.numpy()
    assert np.abs(logits - expected).max() < LARGEST * expected.std()


@pytest.mark.slow
def test_gradients_equal_those_of_jax(tmp_path):
    """With checkpointing of activations."""
    net, params, model = text_case("groups", qk_norm="rmsnorm", window_pattern="1:1")
    theirs, _ = to_torch(model, tmp_path)
    tokens = make_tokens(net)

    def loss_of(params):
        logits = net.apply({"params": params}, jnp.asarray(tokens))[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        loss, ours = small_models.jit(jax.value_and_grad(loss_of))(params)
    rows = torch.from_numpy(tokens).long()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # releases of transformers name the method differently
        theirs.gradient_checkpointing_enable()
    found = theirs.train()(rows, labels=rows).loss
    found.backward()
    assert found.item() == pytest.approx(float(loss), rel=1e-5)
    gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    links = dcvit_hf.links(model.description)
    mapped = {name: x.read() for name, x in linking.parameters(links, conversion_models.tensors(gradients)).items()}
    flat = flax.traverse_util.flatten_dict(ours, sep="/")
    assert mapped.keys() == flat.keys()
    largest = max(np.abs(mapped[name] - flat[name]).max() / np.abs(flat[name]).max() for name in flat)
    assert largest < 1e-4


@pytest.mark.slow
def test_the_folder_generates_as_remote_code_and_is_read_back(tmp_path, monkeypatch):
    net, params, model = text_case("both", window_pattern="1:1")
    _, folder = to_torch(model, tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(theirs).__module__.startswith("transformers_modules")
    prompts = make_tokens(net)[:, :5]
    rows = torch.from_numpy(prompts).long()
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    short = theirs.generate(rows[:1, 2:], **options)[0, 3:]
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), rows[:1, 2:]], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    both = theirs.generate(torch.cat([padded, rows[1:]]), attention_mask=mask, **options)
    expected = list(prompts[1])
    for _ in range(5):  # greedy, with the whole row each time
        padded_row = np.array([expected + [1] * (small_models.LENGTH - len(expected))], np.int32)
        expected.append(int(small_models.logits_of(net, params, padded_row)[0, len(expected) - 1].argmax()))
    assert both[1].tolist() == expected
    assert both[0, 5:].tolist() == short.tolist()
    assert theirs.generate(rows, num_beams=3, **options).shape == (2, 10)
    with torch.no_grad():
        theirs.layers[0].mlp.fc_in.weight.mul_(2)
    theirs.save_pretrained(tmp_path / "tuned")
    tuned = open_saved(tmp_path / "tuned")
    assert tuned.description == model.description._replace(fields=non_default(model.description.fields))
    kernel = "Transformer/decoderblock_0/MlpBlock_0/in/kernel"
    np.testing.assert_array_equal(tuned.params[kernel].read(), 2 * model.params[kernel].read())


def test_a_tuned_model_of_two_classes_without_names_is_read_back(tmp_path):
    """transformers does not write the names that it gives to two classes by default."""
    _, params, model = conversion_models.image_model(depth=1)
    params = {**params, "head": jax.tree.map(lambda x: x[..., :2], params["head"])}
    description = model.description._replace(num_outputs=2)
    theirs, _ = to_torch(model._replace(description=description, params=conversion_models.tensors(params)), tmp_path)
    theirs.save_pretrained(tmp_path / "tuned")
    assert "id2label" not in json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert open_saved(tmp_path / "tuned").description.num_outputs == 2


def non_default(fields):
    return {key: value for key, value in fields.items() if value != dcvit_hf.FIELDS["lm"][key]}


@pytest.mark.parametrize("name", ["vit", "lm"])
def test_the_fields_of_the_file_have_the_defaults_of_the_models(name):
    in_file = modeling.IMAGE_FIELDS if name == "vit" else modeling.TEXT_FIELDS
    differing = {k for k, v in dcvit_hf.FIELDS[name].items() if k != "tied" and in_file[k] != v}
    assert differing == {"compose"}  # the classes are named for DCMHA


def test_new_models_start_close_to_plain_attention():
    shared = dict(width=32, depth=1, num_heads=4, vocab_size=17, context=12)
    torch.manual_seed(0)
    composed = modeling.DCFormerForCausalLM(modeling.DCFormerConfig(**shared)).eval()
    plain = modeling.DCFormerForCausalLM(modeling.DCFormerConfig(**shared, compose=None)).eval()
    assert not plain.load_state_dict(composed.state_dict(), strict=False).missing_keys
    rows = torch.from_numpy(np.array(small_models.make_tokens())).long()
    with torch.no_grad():
        logits = plain(rows).logits
        assert 0 < (composed(rows).logits - logits).abs().max() < 0.1 * logits.abs().max()


def new_model(**fields):
    """Return a random language model of the file, with weights large enough that tokens make a difference."""
    torch.manual_seed(0)
    shape = dict(width=32, depth=2, num_heads=4, vocab_size=19, context=16, pad_token_id=0, initializer_range=0.2)
    return modeling.DCFormerForCausalLM(modeling.DCFormerConfig(**shape | fields)).eval()


PADDED = {
    "input_ids": torch.tensor([[0, 0, 5, END, 7, 8], [4, 5, 6, 7, END, 9]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}


@pytest.mark.parametrize(
    ("fields", "beams"), [({"end_of_text": END, "position": "learned"}, 1), ({"window_pattern": "1:1", "window": 3}, 3)]
)
def test_generation_is_the_same_with_and_without_cache(fields, beams):
    """In a padded batch. The releases of transformers pass the cache under different names."""
    model = new_model(**fields)
    options = dict(max_new_tokens=6, do_sample=False, num_beams=beams, return_dict_in_generate=True)
    expected = model.generate(**PADDED, use_cache=False, **options).sequences.tolist()
    for kind in (None, "static"):
        found = model.generate(**PADDED, cache_implementation=kind, **options)
        assert found.sequences.tolist() == expected
        assert len({*found.sequences[:, 6:].flatten().tolist()}) > 1
        assert len(found[modeling.CACHE].layers) == 2


@pytest.mark.exhaustive
def test_rows_and_a_decoding_step_compile_to_one_graph(monkeypatch):
    """As users import the file: dynamo cannot trace the type checker of the tests."""
    spec = importlib.util.spec_from_file_location("as_copied", modeling.__file__)
    file = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "as_copied", file)
    spec.loader.exec_module(file)
    model = file.DCFormerForCausalLM(new_model(end_of_text=END).config).eval()
    compiled, rows = torch.compile(model, fullgraph=True, backend="eager"), PADDED["input_ids"]
    with torch.no_grad():
        expected = model(rows).logits
        torch.testing.assert_close(compiled(rows, use_cache=False).logits, expected, atol=1e-5, rtol=0)
        for cache in (transformers.DynamicCache(), transformers.StaticCache(model.config, max_cache_len=9)):
            model(rows[:, :5], cache=cache)
            found = compiled(rows[:, 5:], cache=cache).logits
            torch.testing.assert_close(found, expected[:, 5:], atol=1e-5, rtol=0)


def test_a_tuple_states_and_weights_are_returned_if_asked_for():
    for compose in ("both", None):
        model, rows = new_model(compose=compose), PADDED["input_ids"][1:]
        with torch.no_grad():
            out = model(rows, output_hidden_states=True, output_attentions=True)
            plain = model(rows)
            torch.testing.assert_close(out.logits, plain.logits, atol=1e-5, rtol=0)
            torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits)
            torch.testing.assert_close(model(rows, return_dict=False)[0], plain.logits)
        assert [x.shape for x in out.hidden_states] == [(1, 6, 32)] * 3
        assert [x.shape for x in out.attentions] == [(1, 4, 6, 6)] * 2
        assert plain.hidden_states is None
        assert plain.attentions is None
        upper = torch.ones(6, 6, dtype=torch.bool).triu(1)
        assert not any(x[..., upper].any() for x in out.attentions)


def test_embeddings_positions_masks_and_both_names_of_the_cache_are_honoured():
    """A packed row has the logits of its documents alone, by positions or by a mask."""
    model, one, other = new_model(), torch.tensor([[4, 5, 6, 7]]), torch.tensor([[8, 9]])
    packed, positions = torch.cat([one, other], dim=1), torch.tensor([[0, 1, 2, 3, 0, 1]])
    with torch.no_grad():
        expected = torch.cat([model(one).logits, model(other).logits], dim=1)
        torch.testing.assert_close(model(packed, position_ids=positions).logits, expected, atol=1e-5, rtol=0)
        document = torch.tensor([0, 0, 0, 0, 1, 1])
        mask = (document[:, None] == document)[None, None]
        torch.testing.assert_close(model(packed, attention_mask=mask).logits, expected, atol=1e-5, rtol=0)
        for name in ("past_key_values", "cache"):
            cache = model(one[:, :3], use_cache=True)[modeling.CACHE]
            found = model(one[:, 3:], **{name: cache}).logits
            torch.testing.assert_close(found, expected[:, 3:4], atol=1e-5, rtol=0)
        embedded = model.get_input_embeddings()(packed)
        torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(packed).logits)


def test_accumulated_gradients_are_those_of_one_batch(tmp_path):
    """In transformers' Trainer, one step of plain gradient descent."""

    def trained(batch, steps):
        torch.manual_seed(0)
        model = new_model()
        data = [{"input_ids": row, "labels": row} for row in torch.randint(1, 19, (4, 6))]
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=steps, max_steps=1,
            learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=data).train()
        return {name: x.detach() - before[name] for name, x in model.named_parameters()}

    whole, accumulated = trained(4, 1), trained(1, 4)
    assert max(x.abs().max() for x in whole.values()) > 1e-3
    for name, change in whole.items():
        torch.testing.assert_close(accumulated[name], change, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", [dcvit_hf.IMAGE, dcvit_hf.TEXT])
def test_automatic_classes_load_the_folder_without_its_head(kind, tmp_path):
    image = kind == dcvit_hf.IMAGE
    net, _, model = conversion_models.image_model((16, 16, 3)) if image else text_case("folded")
    headed, folder = to_torch(model, tmp_path)
    named = json.loads((folder / "config.json").read_text())["auto_map"]
    assert image or headed.config.eos_token_id == END
    assert named == {name: f"{dcvit_hf.MODULE}.{value}" for name, value in dcvit_hf.CLASSES[kind].items()}
    base_class = getattr(modeling, dcvit_hf.CLASSES[kind]["AutoModel"])
    base, report = base_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if image:
            x = torch.randn(2, 3, 16, 16, generator=generator)
            found, expected = headed.head(base.eval()(x).pooler_output), headed(x).logits
        else:
            x = torch.from_numpy(make_tokens(net)).long()
            found, expected = headed.lm_head(base.eval()(x).last_hidden_state), headed(x).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_loss_of_several_labels_is_that_of_training(tmp_path):
    """`sigmoid_xent` is a sum over classes, transformers' loss a mean."""
    _, _, model = conversion_models.image_model()
    described = model.description._replace(multilabel=True)
    loaded, _ = to_torch(model._replace(description=described), tmp_path)
    images, labels = torch.randn(3, 3, 16, 16), (torch.rand(3, 10) < 0.4).float()
    with torch.no_grad():
        found = loaded(images, labels=labels)
    expected = losses.sigmoid_xent(jnp.asarray(found.logits.numpy()), jnp.asarray(labels.numpy()))
    assert found.loss.item() == pytest.approx(float(jnp.mean(expected)) / 10, rel=1e-5)
