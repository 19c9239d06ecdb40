"""Bad command lines: misspelt commands and options, missing ones, and values that are out of range."""

from bad_data import NOT_UTF8
from workspace import (
    SEVEN,
    bad,
    command,
    evaluate,
    file,
    generate,
    predict,
    train,
)

PROMPT = ("--prompt", "def")


TRAIN = {
    "misspelt train": bad(command("trian"), "train"),
    "train without a workdir": bad(command("train", "--config", "vit_digits"), "--workdir"),
    "cluster options that are incomplete": bad(
        train("vit_digits", "--num_processes", 2), "--coordinator", "--process_id"
    ),
}

EVALUATE = {
    "evaluate with an override but no config": bad(evaluate("--config.seed=1"), "--config.KEY=VALUE", "--config"),
    "report of a language model": bad(
        command("evaluate", "--workdir", "{lm}", "--report", "{folder}/r.html"),
        "--report",
        "'classification'",
    ),
}

PREDICT = {
    "predict without images": bad(predict(), "no image files"),
    "predict a truncated image": bad(predict(file("a.png", SEVEN.read_bytes()[:60])), "a.png", status=1),
}

GENERATE = {
    "more tokens than the context": bad(generate(*PROMPT, "--tokens", 9999), "context"),
    "--top_p 1.5": bad(generate(*PROMPT, "--top_p", 1.5), "top_p"),
    "prompt file that is not UTF-8": bad(generate("--prompt_file", file("p.txt", NOT_UTF8)), "p.txt", "not UTF-8"),
}

COMPARE = {
    "compare a missing workdir": bad(command("compare", "no/such/run"), "no/such/run"),
    "compare by an unknown metric": bad(command("compare", "{vit}", "--metric", "test/mean_recal"), "test/mean_recall"),
    "a removed option of compare": bad(command("compare", "{vit}", "--group", "seed"), "--group", "removed in 0.3.0"),
}

TOKENIZE = {
    "tokenize missing data": bad(command("tokenize", "--data", "{folder}/none", "--out", "{folder}/t"), "no files at"),
}

BAD_COMMAND_LINES = TRAIN | EVALUATE | PREDICT | GENERATE | COMPARE | TOKENIZE
