"""Bad configs: files that fail, misspelt names, and values that are out of range or of another type."""

from workspace import (
    bad,
    config_file,
    digits_config,
    lm,
    train,
    vit,
)

FILES = {
    "missing config file": bad(train("no/such.py"), "no/such.py"),
    "config that is a folder": bad(train("{folder}"), "no config file"),
    "empty config name": bad(train(""), "''"),
    "syntax error": bad(config_file("def get_config(:\n"), "mine.py: SyntaxError"),
    "config file that is not UTF-8": bad(config_file(b"name = '\xff\xfe'\n"), "mine.py: SyntaxError"),
    "no get_config": bad(config_file("config = {}\n"), "mine.py", "'get_config'"),
    "get_config raises": bad(
        config_file("def get_config():\n    raise ValueError('one\\ntwo')\n"), "mine.py: ValueError: one"
    ),
    "get_config returns a dict": bad(config_file("def get_config():\n    return {}\n"), "dict", "ConfigDict"),
    "sys.exit in get_config": bad(
        config_file("def get_config():\n    import sys\n    sys.exit('bye')\n"), "mine.py: SystemExit: bye"
    ),
    "infinite recursion": bad(config_file("def get_config():\n    return get_config()\n"), "mine.py: RecursionError"),
    "missing library": bad(config_file("import no_such_library\n"), "No module named 'no_such_library'"),
    "missing argument": bad(config_file("def get_config(size): pass\n"), "1 required positional argument: 'size'"),
    "argument of another type": bad(train("vit_digits:epochs=x"), "epochs=x", "int"),
}

REQUIRED = "from ml_collections.config_dict import required_placeholder"
STRUCTURE = {
    "unknown key set by the file": bad(digits_config("config.lrr = 1.0"), "mine.py", "'config.lrr'", "'lr'"),
    "two totals": bad(digits_config("config.total_steps = 3"), "config.total_steps", "config.total_epochs"),
    "no data": bad(digits_config("del config.input['data']"), "config.input.data"),
    "data that is not a dict": bad(digits_config("config.input = {**config.input, 'data': 3}"), "config.input.data"),
    "evaluator that is not a dict": bad(digits_config("config.evals = {'test': 3}"), "config.evals.test=3", "dict"),
    "required key without value": bad(
        digits_config(REQUIRED, "config.lr = required_placeholder(float)"), "mine.py", "config.lr", "--config.lr=VALUE"
    ),
    "evaluator without preprocessing": bad(digits_config("del config.evals.test['pp']"), "missing", "pp"),
}

VALUES = {
    "removed key": bad(vit("mlflow.experiment=a"), "config.mlflow", "removed in 0.3.0"),
    "negative total": bad(vit("total_steps=-5"), "config.total_steps=-5"),
    "negative learning rate": bad(vit("lr=-0.1"), "config.lr=-0.1", "negative"),
    "EMA that never changes": bad(vit("ema_decay=1.0"), "config.ema_decay=1.0", "[0, 1)"),
    "warm-up of no average": bad(vit("ema_warmup=True"), "config.ema_warmup=True", "set config.ema_decay"),
    "layer-wise growth": bad(vit("layer_decay=1.5"), "config.layer_decay=1.5", "(0, 1]"),
    "more frozen layers than there are": bad(vit("freeze_layers=99"), "freeze_layers=99", "the number of blocks"),
    "label smoothing of 1": bad(vit("label_smoothing=1.0"), "config.label_smoothing=1.0", "[0, 1)"),
    "profile beyond the last step": bad(vit("profile=(9,10)"), "config.profile=(9, 10)"),
    "profile that ends before it starts": bad(vit("profile=(5,2)"), "first step", "last step"),
    "model that is a number": bad(vit("model=3"), "config.model=3", "ConfigDict", "int"),
    "optimizer argument that is a word": bad(vit("optax.b1=much"), "b1"),
    "schedule end that is a word": bad(vit("schedule.end=low"), "end='low'", "float"),
    "negative warm-up": bad(vit("schedule.warmup_percent=-1"), "config.schedule.warmup_percent=-1"),
    "early stop without patience": bad(vit("early_stop=('test/top1', 'max')"), "config.early_stop", "NAME/METRIC"),
    "negative checkpoint interval": bad(vit("keep_ckpt_steps=-1"), "config.keep_ckpt_steps=-1"),
    "z-loss of images": bad(vit("z_loss=0.1"), "config.z_loss=0.1", "language models"),
}


NUMBERS = {
    "learning rate of 400 digits": bad(vit(f"lr={10**400}"), "--config.lr", "too large"),
    "10**12 steps": bad(vit(f"total_steps={10**12}"), "config.total_steps=1000000000000", "2,147,483,647 steps"),
}

MISSPELT_CONFIGS = {  # the error suggests the correct name
    ":atention=mha": bad(train("vit_digits:atention=mha"), "attention"),
    ":attention=mah": bad(train("vit_digits:attention=mah"), "mha"),
}

MISSPELT_VIT = {  # override of a training run on images -> the correct spelling
    "total_epoch=1": "total_epochs",
    "model.widht=1": "width",
    "optax.beta1=0.9": "b1",
    "schedule.warmup_step=1": "warmup_steps",
    "input.batchsize=64": "batch_size",
    "evals.tset.pp=": "test",
    "model_name=vitt": "vit",
    "model.variant=DCViT-Tii/16": "Ti",
    "model.compose=bth": "both",
    "model.dtype_mm=bfloat": "bfloat16",
    "loss=softmax": "softmax_xent",
    "optax_name=scale_by_adamm": "scale_by_adam",
    "evals.test.type=clasification": "classification",
    "sharding_strategy=fspd": "fsdp",
    "mesh=[('dta', -1)]": "data",
    "input.corrupt=skp": "skip",
    "ckpt_best=('test/topp1', 'max')": "test/top1",
    "early_stop=('test/top1', 'mxa', 3)": "max",
}

MISSPELT_LM = {  # the same for text
    "model.window_patern=1:1": "window_pattern",
    "model.preset=DCFormer+-405M": "DCFormer++-405M",
    "model.mlp=swigl": "swiglu",
}

BAD_CONFIGS = (
    FILES
    | STRUCTURE
    | VALUES
    | NUMBERS
    | MISSPELT_CONFIGS
    | {change: bad(vit(change), right) for change, right in MISSPELT_VIT.items()}
    | {change: bad(lm(change), right) for change, right in MISSPELT_LM.items()}
)
