"""Bad configs: files that fail, misspelt names, and values that are out of range or of another type."""

from workspace import (
    SEVEN,
    Argv,
    after,
    bad,
    config_file,
    digits_config,
    evaluate,
    lm,
    misspelt,
    overwrite,
    predict,
    text,
    text_file,
    train,
    vit,
)

HUGE = 2**62

FILES = {
    "missing config file": bad(train("no/such.py"), "no/such.py"),
    "config that is a folder": bad(train(lambda ws: ws.folder), "no config file"),
    "empty config name": bad(train(""), "''"),
    "syntax error": bad(config_file("def get_config(:\n"), "mine.py: SyntaxError"),
    "config file that is not UTF-8": bad(config_file(b"name = '\xff\xfe'\n"), "mine.py: SyntaxError"),
    "config file of NUL bytes": bad(config_file(b"\0\0\0"), "mine.py: SyntaxError"),
    "no get_config": bad(config_file("config = {}\n"), "mine.py", "'get_config'"),
    "get_config is not a function": bad(config_file("get_config = 3\n"), "mine.py: TypeError"),
    "get_config raises": bad(
        config_file("def get_config():\n    raise ValueError('one\\ntwo')\n"), "mine.py: ValueError: one"
    ),
    "get_config returns a dict": bad(config_file("def get_config():\n    return {}\n"), "dict", "ConfigDict"),
    "get_config returns nothing": bad(config_file("def get_config():\n    pass\n"), "NoneType", "ConfigDict"),
    "sys.exit in the config file": bad(config_file("import sys\nsys.exit(0)\n"), "mine.py: SystemExit: 0"),
    "sys.exit in get_config": bad(
        config_file("def get_config():\n    import sys\n    sys.exit('bye')\n"), "mine.py: SystemExit: bye"
    ),
    "infinite recursion": bad(config_file("def get_config():\n    return get_config()\n"), "mine.py: RecursionError"),
    "missing library": bad(config_file("import no_such_library\n"), "No module named 'no_such_library'"),
    "missing argument": bad(config_file("def get_config(size): pass\n"), "1 required positional argument: 'size'"),
    "argument of another type": bad(train("vit_digits:epochs=x"), "epochs=x", "int"),
    "argument without value": bad(train("vit_digits:epochs"), "key=value"),
}

STRUCTURE = {
    "unknown key set by the file": bad(digits_config("config.lrr = 1.0"), "mine.py", "'config.lrr'", "'lr'"),
    "unknown model field set by the file": bad(
        digits_config("config.model.widht = 8"), "config.model", "'widht'", "'width'"
    ),
    "two totals": bad(digits_config("config.total_steps = 3"), "config.total_steps", "config.total_epochs"),
    "two warm-ups": bad(
        digits_config("config.schedule.warmup_steps = 3"),
        "config.schedule.warmup_steps",
        "config.schedule.warmup_percent",
    ),
    "two intervals": bad(digits_config("config.log_epochs = 3"), "config.log_percent", "config.log_epochs"),
    "two intervals of an evaluator": bad(
        digits_config("config.evals.test.log_steps = 3"),
        "config.evals.test.log_steps",
        "config.evals.test.log_percent",
    ),
    "total as a percentage": bad(digits_config("del config.total_epochs", "config.total_percent = 5"), "percentage"),
    "no total": bad(digits_config("del config.total_epochs"), "total_epochs", "total_steps", "total_examples"),
    "total that is a string": bad(
        digits_config("config.total_epochs = None", "config.total_steps = 'many'"), "config.total_steps='many'"
    ),
    "no data": bad(digits_config("del config.input['data']"), "config.input.data"),
    "data that is not a dict": bad(digits_config("config.input = {**config.input, 'data': 3}"), "config.input.data"),
    "evaluator that is not a dict": bad(digits_config("config.evals = {'test': 3}"), "config.evals.test=3", "dict"),
    "evaluator without preprocessing": bad(digits_config("del config.evals.test['pp']"), "missing", "pp"),
}

VALUES = {
    "negative total": bad(vit("total_steps=-5"), "config.total_steps=-5"),
    "seed that is a fraction": bad(vit("seed=1.5"), "config.seed=1.5", "int"),
    "learning rate that is a word": bad(vit("lr=fast"), "config.lr=fast", "float"),
    "negative learning rate": bad(vit("lr=-0.1"), "config.lr=-0.1", "negative"),
    "infinite learning rate": bad(vit("lr=1e999"), "config.lr=inf", "finite"),
    "EMA that never changes": bad(vit("ema_decay=1.0"), "config.ema_decay=1.0", "[0, 1)"),
    "label smoothing of 1": bad(vit("label_smoothing=1.0"), "config.label_smoothing=1.0", "[0, 1)"),
    "gradients clipped to 0": bad(vit("grad_clip_norm=0.0"), "config.grad_clip_norm=0.0", "finite"),
    "batch size that is a string": bad(vit("input.batch_size='64'"), "config.input.batch_size"),
    "batch size of 0": bad(vit("input.batch_size=0"), "config.input.batch_size=0", "1"),
    "profile beyond the last step": bad(vit("profile=(9,10)"), "config.profile=(9, 10)"),
    "profile that ends before it starts": bad(vit("profile=(5,2)"), "first step", "last step"),
    "model that is a number": bad(vit("model=3"), "config.model=3", "ConfigDict", "int"),
    "optimizer argument that is a word": bad(vit("optax.b1=much"), "b1"),
    "unknown dtype of the moments": bad(vit("optax.mu_dtype=bfloat17"), "'bfloat17'"),
    "frozen pattern that matches nothing": bad(vit("frozen=['heda/.*']"), "frozen", "'heda/.*'"),
    "schedule end that is a word": bad(vit("schedule.end=low"), "end='low'", "float"),
    "negative warm-up": bad(vit("schedule.warmup_percent=-1"), "config.schedule.warmup_percent=-1"),
    "warm-up longer than the run": bad(vit("schedule.warmup_steps=100"), "2 steps"),
    "early stop without patience": bad(vit("early_stop=('test/top1', 'max')"), "config.early_stop", "NAME/METRIC"),
    "early stop of no evaluation": bad(vit("early_stop=('test/top1', 'max', 0)"), "config.early_stop", "1 or more"),
    "early stop with a fraction": bad(vit("early_stop=('test/top1', 'max', 1.5)"), "config.early_stop", "1 or more"),
    "negative checkpoint interval": bad(vit("keep_ckpt_steps=-1"), "config.keep_ckpt_steps=-1"),
    "mesh of 3 of 8 devices": bad(vit("mesh=[('data', 3)]"), "found 8", "3 devices"),
    "strategy without its mesh axis": bad(vit("sharding_strategy=fsdp"), "config.mesh", "'fsdp'"),
    "width of 0": bad(vit("model.width=0"), "width=0", "1"),
    "negative depth": bad(vit("model.depth=-1"), "depth=-1", "negative"),
    "heads that do not divide the width": bad(vit("model.num_heads=3"), "num_heads=3", "width=16"),
    "patch of three sides": bad(vit("model.patch_size=(4, 4, 4)"), "patch_size=(4, 4, 4)"),
    "mixup of text": bad(text(text_file("a.txt", "some text " * 50), "mixup=0.2"), "config.mixup=0.2", "images"),
    "z-loss of images": bad(vit("z_loss=0.1"), "config.z_loss=0.1", "language models"),
}

REQUIRED = "from ml_collections.config_dict import required_placeholder, placeholder"
PLACEHOLDERS = {
    "required key without value": bad(
        digits_config(REQUIRED, "config.lr = required_placeholder(float)"), "mine.py", "config.lr", "--config.lr=VALUE"
    ),
    "required model field without value": bad(
        digits_config(REQUIRED, "config.model.width = required_placeholder(int)"), "mine.py", "config.model.width"
    ),
    "placeholder of another key": bad(digits_config(REQUIRED, "config.wd = placeholder(float)"), "config.wd=None"),
}


def stored(content: str, argv: Argv) -> Argv:
    """A command on the completed image run, with another config.json."""
    return after(overwrite("config.json", content), argv)


ABSURD = {
    **{
        f"{name} of 2**62": bad(vit(f"model.{name}={HUGE}"), f"{name}={HUGE}")
        for name in ("width", "depth", "rep_size")
    },
    **{f"{name} of 2**62": bad(lm(f"model.{name}={HUGE}"), f"{name}={HUGE}") for name in ("context", "window")},
    "rank of 2**62": bad(lm("model.compose=both", f"model.rank={HUGE}"), f"rank={HUGE}", "at most 65,536"),
    "depth of 10**9": bad(vit(f"model.depth={10**9}"), "depth=1000000000", "at most 4,096"),
    "vocabulary of 10**9": bad(lm(f"vocab_size={10**9}"), "config.vocab_size=1000000000", "2**24"),
    "10**9 classes": bad(vit(f"num_classes={10**9}"), "config.num_classes=1000000000", "2**24"),
    "width of 400 digits": bad(vit(f"model.width={10**400}"), "config.model.width", "1329 bits"),
    "learning rate of 400 digits": bad(vit(f"lr={10**400}"), "--config.lr", "too large"),
    "watchdog after 10**30 seconds": bad(vit(f"watchdog_seconds={10**30}"), "config.watchdog_seconds", "1e9"),
    "10**12 steps": bad(vit(f"total_steps={10**12}"), "config.total_steps=1000000000000", "2,147,483,647 steps"),
    "path with NUL": bad(vit(r"model_init='a\0b'"), "config.model_init", "NUL"),
    "stored depth of 10**9": bad(
        stored('{"model": {"depth": 1000000000}, "num_classes": 10}', predict(SEVEN)), "depth"
    ),
    "stored seed of 2**70": bad(stored(f'{{"seed": {2**70}}}', evaluate()), "config.json", "config.seed"),
    **{
        f"stored config of {levels} levels": bad(
            stored('{"model": ' + '{"a": ' * levels + "0" + "}" * (levels + 1), evaluate()), "config.json"
        )
        for levels in (40, 300, 900, 100_000)
    },
}

MISSPELT_CONFIGS = {
    "vit_digit": misspelt(train("vit_digit"), "vit_digits"),
    "lm_stdlb": misspelt(train("lm_stdlb"), "lm_stdlib"),
    ":atention=mha": misspelt(train("vit_digits:atention=mha"), "attention"),
    ":epoch=3": misspelt(train("vit_digits:epoch=3"), "epochs"),
    ":step=3": misspelt(train("lm_stdlib:step=3"), "steps"),
    ":attention=mah": misspelt(train("vit_digits:attention=mah"), "mha"),
    ":varaint=ViT-S/16": misspelt(train("vit_i1k:varaint=ViT-S/16"), "variant"),
    ":datadir=x": misspelt(train("vit_folder:datadir=x"), "data_dir"),
}

MISSPELT_VIT = {  # override of a training run on images -> the correct spelling
    "total_epoch=1": "total_epochs",
    "totalsteps=1": "total_steps",
    "log_step=1": "log_steps",
    "checkpoint_steps=1": "ckpt_steps",
    "lrr=1": "lr",
    "wdd=1": "wd",
    "optx_name=scale_by_adam": "optax_name",
    "labelsmoothing=0.1": "label_smoothing",
    "grad_clip=1.0": "grad_clip_norm",
    "ema_deacy=0.9": "ema_decay",
    "mix_up=0.2": "mixup",
    "sharding_stratgy=ddp": "sharding_strategy",
    "sed=1": "seed",
    "modle.width=1": "model",
    "model.widht=1": "width",
    "model.num_head=1": "num_heads",
    "model.pooltype=gap": "pool_type",
    "model.qk_nrom=rmsnorm": "qk_norm",
    "optax.beta1=0.9": "b1",
    "optax.mu_dtpye=bfloat16": "mu_dtype",
    "schedule.warmup_step=1": "warmup_steps",
    "schedule.decay_typ=cosine": "decay_type",
    "schedule.time_scale=100": "timescale",
    "input.batchsize=64": "batch_size",
    "inptu.batch_size=64": "input",
    "input.date.kind=digits": "data",
    "input.data.spilt=train": "split",
    "input.data.cahce=True": "cache",
    "evals.tset.pp=": "test",
    "evals.test.batchsize=1": "batch_size",
    "evals.test.log_step=1": "log_steps",
    "evals.test.data.spilt=x": "split",
    "model_name=vitt": "vit",
    "model.variant=DCViT-Tii/16": "Ti",
    "model.compose=bth": "both",
    "model.branches=kq": "qk",
    "model.posemb=sincos": "sincos2d",
    "model.pool_type=gpa": "gap",
    "model.qk_norm=layer_norm": "layernorm",
    "model.remat=ful": "full",
    "model.dtype_mm=bfloat": "bfloat16",
    "model.implementation=refrence": "reference",
    "loss=softmax": "softmax_xent",
    "loss=sigmoid_xnet": "sigmoid_xent",
    "optax_name=scale_by_adamm": "scale_by_adam",
    "optax_name=adam": "scale_by_adam",
    "schedule.decay_type=cosin": "cosine",
    "input.pp=flip": "flip_lr",
    "evals.test.pp=value_rang(-1, 1)": "value_range",
    "input.pp=value_range(vmni=-1)": "vmin",
    "evals.test.type=clasification": "classification",
    "input.data.kind=digit": "digits",
    "input.data.split=trian": "train",
    "sharding_strategy=fspd": "fsdp",
    "sharding_strategy=fsdp+tensr": "fsdp+tensor",
    "mesh=[('dta', -1)]": "data",
    "input.corrupt=skp": "skip",
    "on_corrupt=previos": "previous",
    "ckpt_best=('tset/top1', 'max')": "test",
    "ckpt_best=('test/topp1', 'max')": "test/top1",
    "ckpt_best=('test/top1', 'mxa')": "max",
    "early_stop=('test/topp1', 'max', 3)": "test/top1",
    "early_stop=('test/top1', 'mxa', 3)": "max",
}

MISSPELT_LM = {  # the same for text
    "loss_chunks=8": "loss_chunk",
    "vocabsize=257": "vocab_size",
    "model.rotary_fractoin=0.5": "rotary_fraction",
    "model.window_patern=1:1": "window_pattern",
    "input.data.contxt=16": "context",
    "evals.validation.data.limt=16": "limit",
    "model.preset=DCFormer+-405M": "DCFormer++-405M",
    "model.preset=Pythia-2.8": "Pythia-2.8B",
    "model.position=rotry": "rotary",
    "model.mlp=swigl": "swiglu",
    "evals.validation.type=perplexty": "perplexity",
    "input.data={'kind': 'megatro'}": "megatron",
    "evals.validation.data.split=validaton": "validation",
}

BAD_CONFIGS = (
    FILES
    | STRUCTURE
    | VALUES
    | PLACEHOLDERS
    | ABSURD
    | MISSPELT_CONFIGS
    | {change: misspelt(vit(change), right) for change, right in MISSPELT_VIT.items()}
    | {change: misspelt(lm(change), right) for change, right in MISSPELT_LM.items()}
)
