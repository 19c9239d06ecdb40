"""Mistakes in configs, data, checkpoints and command lines: a command, and the facts that its error has."""

from workspace import (
    SEVEN,
    Workspace,
    after,
    bad,
    broken_image,
    command,
    config_file,
    cut_metrics,
    damage,
    digits_config,
    evaluate,
    file,
    generate,
    image_folder,
    lm,
    one_class,
    overwrite,
    pickled,
    predict,
    remove,
    resume,
    text,
    train,
    vit,
    write_tokens,
)  # fmt: skip

NOT_UTF8 = b"good line\nbad \xff\xfe line\n" * 20
CHECKPOINT = "checkpoints/60"
RECORDS = text("input_ids", "{folder}/a.tfrecord", vocab_size=257)

BAD_CONFIGS = {
    "missing config file": bad(train("no/such.py"), "no/such.py"),
    "syntax error": bad(config_file("def get_config(:\n"), "mine.py: SyntaxError"),
    "get_config raises": bad(
        config_file("def get_config():\n    raise ValueError('one\\ntwo')\n"), "mine.py: ValueError: one"
    ),
    "argument of another type": bad(train("vit_digits:epochs=x"), "epochs=x", "int"),
    "misspelt argument": bad(train("vit_digits:atention=mha"), "attention"),
    "unknown key set by the file": bad(digits_config("config.lrr = 1.0"), "mine.py", "'config.lrr'", "'lr'"),
    "no data": bad(digits_config("del config.input['data']"), "config.input.data"),
    "evaluator without preprocessing": bad(digits_config("del config.evals.test['pp']"), "missing", "pp"),
    "removed key": bad(vit("mlflow.experiment=a"), "config.mlflow", "removed in 0.3.0"),
    "negative total": bad(vit("total_steps=-5"), "config.total_steps=-5"),
    "number above the largest float": bad(vit(f"lr={10**400}"), "int too large to convert to float"),
    "more frozen layers than there are": bad(vit("freeze_layers=99"), "freeze_layers=99", "the number of blocks"),
    "profile beyond the last step": bad(vit("profile=(9,10)"), "config.profile=(9, 10)"),
    "optimizer argument that is a word": bad(vit("optax.b1=much"), "b1"),
    "z-loss of images": bad(vit("z_loss=0.1"), "config.z_loss=0.1", "language models"),
}
MISSPELT = {  # override -> the correct spelling, which the error suggests
    "total_epoch=1": "total_epochs",
    "model.widht=1": "width",
    "model_name=vitt": "vit",
    "model.variant=DCViT-Tii/16": "Ti",
    "optax_name=scale_by_adamm": "scale_by_adam",
    "mesh=[('dta', -1)]": "data",
    "ckpt_best=('test/topp1', 'max')": "test/top1",
}
BAD_DATA = {
    "file that is not an image": bad(after(broken_image, image_folder()), "0.png", notice="images of 2 classes"),
    "folder of one class": bad(
        after(one_class, image_folder()), "config.num_classes=1", "'cat'", notice="images of 1 classes"
    ),
    "text that is not UTF-8": bad(
        after(file("a.txt", NOT_UTF8), text("text", "{folder}/a.txt")), "a.txt:2: not UTF-8", "byte 5"
    ),
    "tokens beyond the vocabulary in a later row": bad(
        after(write_tokens, text("megatron", "{folder}/pair", vocab_size=190)), "token 190", starts=True
    ),
    "damaged records": bad(
        after(file("a.tfrecord", b"\1" * 40), RECORDS), "a.tfrecord", "damaged", "record 0", notice="records"
    ),
}
BAD_CHECKPOINTS = {
    "resume with a damaged state": bad(after(damage(60, "rest"), resume()), f"{CHECKPOINT} is damaged", "rest/"),
    "evaluate damaged weights": bad(after(damage(60, "ema"), evaluate()), "--checkpoint", "checkpoints/30"),
    "checksums missing": bad(after(remove(f"{CHECKPOINT}/SHA256SUMS"), resume()), "SHA256SUMS"),
    "config.json missing and another model": bad(after(remove("config.json"), resume("model.width=16")), "/vit"),
    "metrics damaged before the last line": bad(after(cut_metrics, resume()), "metrics.jsonl:2", "damaged"),
    "data.json of other classes": bad(
        after(overwrite("data.json", '{"class_names": ["a", "b"]}'), predict(SEVEN)), "data.class_names", "['a', 'b']"
    ),
    "accepted.json damaged": bad(after(overwrite("accepted.json", '{"accept": 3}'), resume()), "accepted.json"),
    "run without a checkpoint": bad(after(remove("checkpoints"), evaluate()), "no checkpoint"),
    "start from another model's weights": bad(vit("model_init={lm}"), "head/kernel", "model"),
    "predict with a language model": bad(command("predict", "--workdir", "{lm}", SEVEN), "dcvit generate"),
    "generate with an image model": bad(command("generate", "--workdir", "{vit}", "--prompt", "def"), "language model"),
    "weights that are a pickle": bad(after(pickled, vit("model_init={folder}/weights.npz")), "weights.npz"),
    "workdir in use": bad(after(Workspace.lock, resume()), "/vit", "in use"),
    "workdir below a file": bad(after(file("file", ""), vit(workdir="{folder}/file/run")), "workdir", "/file/run"),
    "fewer steps than completed": bad(resume("total_steps=1", accept=("total_steps",)), "step 60", "1 steps"),
    "accept an unknown key": bad(resume(accept=("lrr",)), "--accept lrr", "'lr'"),
}
BAD_COMMAND_LINES = {
    "misspelt command": bad(command("trian"), "train"),
    "train without a workdir": bad(command("train", "--config", "vit_digits"), "--workdir"),
    "incomplete cluster options": bad(train("vit_digits", "--num_processes", 2), "--coordinator", "--process_id"),
    "override but no config": bad(evaluate("--config.seed=1"), "--config.KEY=VALUE", "--config"),
    "report of a language model": bad(
        command("evaluate", "--workdir", "{lm}", "--report", "{folder}/r.html"), "--report", "'classification'"
    ),
    "predict a truncated image": bad(predict(file("a.png", SEVEN.read_bytes()[:60])), "a.png", status=1),
    "more tokens than the context": bad(generate("--prompt", "def", "--tokens", 9999), "context"),
    "prompt file that is not UTF-8": bad(generate("--prompt_file", file("p.txt", NOT_UTF8)), "p.txt", "not UTF-8"),
    "compare by an unknown metric": bad(command("compare", "{vit}", "--metric", "test/mean_recal"), "test/mean_recall"),
    "removed option": bad(command("compare", "{vit}", "--group", "seed"), "--group", "removed in 0.3.0"),
    "tokenize missing data": bad(command("tokenize", "--data", "{folder}/none", "--out", "{folder}/t"), "no files at"),
}
BAD_INPUTS = {
    **BAD_CONFIGS,
    **{change: bad(vit(change), right) for change, right in MISSPELT.items()},
    "model.preset=DCFormer+-405M": bad(lm("model.preset=DCFormer+-405M"), "DCFormer++-405M"),
    **BAD_DATA,
    **BAD_CHECKPOINTS,
    **BAD_COMMAND_LINES,
}
