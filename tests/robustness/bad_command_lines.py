"""Bad command lines: misspelt commands and options, missing ones, and values that are out of range."""

from bad_data import NOT_UTF8
from workspace import (
    SEVEN,
    Argv,
    Word,
    bad,
    command,
    evaluate,
    file,
    generate,
    predict,
    train,
)

PROMPT = ("--prompt", "def")


def tokenize(data: Word, *options: Word) -> Argv:
    return command("tokenize", "--data", data, "--out", "{folder}/tokens", *options)


TEXT = file("a.txt", "x")

TRAIN = {
    "misspelt train": bad(command("trian"), "train"),
    "train without options": bad(command("train"), "--config", "--workdir"),
    "train without a workdir": bad(command("train", "--config", "vit_digits"), "--workdir"),
    "workdir in an unsupported store": bad(train("vit_digits", workdir="az://bucket/w"), "az://bucket/w"),
    "cluster options that are incomplete": bad(
        train("vit_digits", "--num_processes", 2), "--coordinator", "--process_id"
    ),
}

EVALUATE = {
    "evaluate without options": bad(command("evaluate"), "--workdir", "--config", "--checkpoint"),
    "evaluate with an override but no config": bad(evaluate("--config.seed=1"), "--config.KEY=VALUE", "--config"),
    "evaluate in an unknown format": bad(evaluate("--format", "xml"), "--format", "'xml'"),
    "table in a missing folder": bad(evaluate("--out", "no/such/table.csv"), "no/such/table.csv"),
    "report of a language model": bad(
        command("evaluate", "--workdir", "{lm}", "--report", "{folder}/r.html"),
        "--report",
        "classifier",
        "perplexity",
    ),
    "table of other columns": bad(evaluate("--out", file("t.csv", "a,b\n1,2\n")), "t.csv", "a,b"),
}

PREDICT = {
    "predict without images": bad(predict(), "no image files"),
    "predict a folder without images": bad(
        predict(lambda ws: ws.write("empty/a.md", "").parent), "no image files", notice="skipped 1 file"
    ),
    "predict a truncated image": bad(predict(file("a.png", SEVEN.read_bytes()[:60])), "a.png", status=1),
    "predict an empty path": bad(predict(""), "empty path"),
    "--topk 0": bad(predict(SEVEN, "--topk", 0), "--topk 0"),
}

GENERATE = {
    "generate without a prompt": bad(generate(), "--prompt", "--prompt_file"),
    "--tokens 0": bad(generate(*PROMPT, "--tokens", 0), "--tokens"),
    "more tokens than the context": bad(generate(*PROMPT, "--tokens", 9999), "context"),
    "--temperature -1": bad(generate(*PROMPT, "--temperature", -1), "temperature"),
    "--top_p 1.5": bad(generate(*PROMPT, "--top_p", 1.5), "top_p"),
    "--top_k -1": bad(generate(*PROMPT, "--top_k", -1), "top_k"),
    "--seed -1": bad(generate(*PROMPT, "--seed", -1, "--tokens", 1), "seed"),
    "empty stop string": bad(generate(*PROMPT, "--stop", ""), "--stop", "empty"),
    "missing prompt file": bad(generate("--prompt_file", "no/such.txt"), "no/such.txt"),
    "prompt file that is not UTF-8": bad(generate("--prompt_file", file("p.txt", NOT_UTF8)), "p.txt", "not UTF-8"),
}

COMPARE = {
    "compare without runs": bad(command("compare"), "runs"),
    "compare a missing workdir": bad(command("compare", "no/such/run"), "no/such/run"),
    "compare by an unknown metric": bad(command("compare", "{vit}", "--metric", "test/mean_recal"), "test/mean_recall"),
    "a removed option of compare": bad(command("compare", "{vit}", "--group", "seed"), "--group", "removed in 0.3.0"),
    "curves in another format": bad(command("compare", "{vit}", "--out", "{folder}/c.gif"), ".png"),
    "curves in a missing folder": bad(command("compare", "{vit}", "--out", "{folder}/no/such/c.png"), "no/such"),
}

TOKENIZE = {
    "tokenize without options": bad(command("tokenize"), "--data", "--out"),
    "tokenize missing data": bad(tokenize("{folder}/none"), "no files at"),
    "tokenize into an existing file": bad(
        command("tokenize", "--data", TEXT, "--out", lambda ws: ws.write("o.bin", "").with_suffix("")), "o.bin"
    ),
}

PATHS = {
    "train --workdir": train("vit_digits", workdir="{}"),
    "predict image": predict("{}"),
    "evaluate --out": evaluate("--out", "{}"),
}


def with_path(path: str, argv: Argv) -> Argv:
    """A command line with a path in place of {}."""
    return lambda ws: [word.replace("{}", path) for word in argv(ws)]


BAD_PATHS = {
    **{f"{name} of nobody": bad(with_path("~nosuchuser/x", argv), "'nosuchuser'") for name, argv in PATHS.items()},
    **{
        f"{name} that is not UTF-8": bad(with_path("\udcff", argv), "not valid UTF-8")
        for name, argv in PATHS.items()
        if "--workdir" in name
    },
}

BAD_COMMAND_LINES = TRAIN | EVALUATE | PREDICT | GENERATE | COMPARE | TOKENIZE | BAD_PATHS
