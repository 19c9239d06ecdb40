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
    "syntax error": bad(config_file("def get_config(:\n"), "mine.py: SyntaxError"),
    "get_config raises": bad(
        config_file("def get_config():\n    raise ValueError('one\\ntwo')\n"), "mine.py: ValueError: one"
    ),
    "missing library": bad(config_file("import no_such_library\n"), "No module named 'no_such_library'"),
    "argument of another type": bad(train("vit_digits:epochs=x"), "epochs=x", "int"),
}

STRUCTURE = {
    "unknown key set by the file": bad(digits_config("config.lrr = 1.0"), "mine.py", "'config.lrr'", "'lr'"),
    "no data": bad(digits_config("del config.input['data']"), "config.input.data"),
    "evaluator without preprocessing": bad(digits_config("del config.evals.test['pp']"), "missing", "pp"),
}

VALUES = {
    "removed key": bad(vit("mlflow.experiment=a"), "config.mlflow", "removed in 0.3.0"),
    "negative total": bad(vit("total_steps=-5"), "config.total_steps=-5"),
    "negative learning rate": bad(vit("lr=-0.1"), "config.lr=-0.1", "negative"),
    "more frozen layers than there are": bad(vit("freeze_layers=99"), "freeze_layers=99", "the number of blocks"),
    "profile beyond the last step": bad(vit("profile=(9,10)"), "config.profile=(9, 10)"),
    "optimizer argument that is a word": bad(vit("optax.b1=much"), "b1"),
    "early stop without patience": bad(vit("early_stop=('test/top1', 'max')"), "config.early_stop", "NAME/METRIC"),
    "z-loss of images": bad(vit("z_loss=0.1"), "config.z_loss=0.1", "language models"),
}


MISSPELT_CONFIGS = {  # the error suggests the correct name
    ":atention=mha": bad(train("vit_digits:atention=mha"), "attention"),
}

MISSPELT_VIT = {  # override of a training run on images -> the correct spelling
    "total_epoch=1": "total_epochs",
    "model.widht=1": "width",
    "optax.beta1=0.9": "b1",
    "model_name=vitt": "vit",
    "model.variant=DCViT-Tii/16": "Ti",
    "optax_name=scale_by_adamm": "scale_by_adam",
    "mesh=[('dta', -1)]": "data",
    "ckpt_best=('test/topp1', 'max')": "test/top1",
}

MISSPELT_LM = {  # the same for text
    "model.window_patern=1:1": "window_pattern",
    "model.preset=DCFormer+-405M": "DCFormer++-405M",
}

BAD_CONFIGS = (
    FILES
    | STRUCTURE
    | VALUES
    | MISSPELT_CONFIGS
    | {change: bad(vit(change), right) for change, right in MISSPELT_VIT.items()}
    | {change: bad(lm(change), right) for change, right in MISSPELT_LM.items()}
)
