"""Damaged or foreign checkpoints and workdirs, and resumed runs whose config has changed."""

from workspace import (
    SEVEN,
    Workspace,
    after,
    bad,
    command,
    cut_metrics,
    damage,
    evaluate,
    file,
    npz,
    overwrite,
    predict,
    remove,
    resume,
    vit,
)

CHECKPOINT = "checkpoints/60"
SUMS = f"{CHECKPOINT}/SHA256SUMS"

DAMAGED = {
    **{
        f"resume with damaged {item}": bad(after(damage(60, item), resume()), f"{CHECKPOINT} is damaged", f"{item}/")
        for item in ("params", "ema", "rest", "about")
    },
    "evaluate damaged weights": bad(after(damage(60, "ema"), evaluate()), "--checkpoint", "checkpoints/30"),
    "predict with damaged weights": bad(after(damage(60, "ema"), predict(SEVEN)), CHECKPOINT, "ema/"),
    "start from damaged weights": bad(after(damage(60, "ema"), vit("model_init={vit}")), CHECKPOINT, "ema/"),
    "checksums missing": bad(after(remove(SUMS), resume()), "SHA256SUMS"),
    "checksums damaged": bad(after(overwrite(SUMS, "nonsense\n"), resume()), "SHA256SUMS", "line 1", "damaged"),
    "item missing": bad(after(remove(f"{CHECKPOINT}/rest"), resume()), CHECKPOINT, "rest/", "missing"),
    "config.json that is not JSON": bad(after(overwrite("config.json", "{"), evaluate()), "config.json"),
    "config.json that is a list": bad(after(overwrite("config.json", "[1]"), evaluate()), "JSON object"),
    "config.json that is not UTF-8": bad(after(overwrite("config.json", b"\xff\xfe"), resume()), "config.json"),
    "config.json missing and another model": bad(after(remove("config.json"), resume("model.width=16")), "/vit"),
    "metrics damaged before the last line": bad(after(cut_metrics, resume()), "metrics.jsonl:2", "damaged"),
    "timing damaged before the last line": bad(
        after(overwrite("timing.jsonl", b"{}\n{\n{}\n"), resume()), "timing.jsonl:1", "damaged"
    ),
    "data.json that is not JSON": bad(after(overwrite("data.json", "{"), resume()), "data.json"),
    "data.json damaged and predicted": bad(after(overwrite("data.json", "{"), predict(SEVEN)), "data.json"),
    "data.json of other classes": bad(
        after(overwrite("data.json", '{"class_names": ["a", "b"]}'), predict(SEVEN)), "data.class_names", "['a', 'b']"
    ),
    "accepted.json damaged": bad(after(overwrite("accepted.json", '{"accept": 3}'), resume()), "accepted.json"),
}

FOREIGN = {
    "missing workdir": bad(command("evaluate", "--workdir", "no/such/run"), "no/such/run"),
    "run without a checkpoint": bad(after(remove("checkpoints"), evaluate()), "no checkpoint"),
    "evaluate the checkpoint of another model": bad(evaluate("--checkpoint", "{lm}"), "/lm", "model"),
    "start from another model's weights": bad(vit("model_init={lm}"), "head/kernel", "model"),
    "predict with a language model": bad(command("predict", "--workdir", "{lm}", SEVEN), "dcvit generate"),
    "generate with an image model": bad(command("generate", "--workdir", "{vit}", "--prompt", "def"), "language model"),
    **{
        f".npz: {kind}": bad(
            after(npz(kind), vit("model_init={folder}/weights.npz")),
            "body/kernel" if kind == "other model" else "weights.npz",
        )
        for kind in ("pickle", "objects", "truncated", "other model")
    },
    "workdir in use": bad(after(Workspace.lock, resume()), "/vit", "in use"),
    "workdir that is a file": bad(vit(workdir=file("file", "")), "workdir", "/file"),
    "workdir below a file": bad(after(file("file", ""), vit(workdir="{folder}/file/run")), "workdir", "/file/run"),
    "workdir where nobody may write": bad(vit(workdir="/proc/run"), "workdir", "/proc/run"),
}

CHANGED = {
    "fewer steps than completed": bad(resume("total_steps=1", accept=("total_steps",)), "step 60", "1 steps"),
    "another model accepted": bad(resume("model.width=16", accept=("model.width",)), "/vit", "model"),
    "accept an unknown key": bad(resume(accept=("lrr",)), "--accept lrr", "'lr'"),
}

BAD_CHECKPOINTS = DAMAGED | FOREIGN | CHANGED
