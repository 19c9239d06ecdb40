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
    "resume with a damaged state": bad(after(damage(60, "rest"), resume()), f"{CHECKPOINT} is damaged", "rest/"),
    "evaluate damaged weights": bad(after(damage(60, "ema"), evaluate()), "--checkpoint", "checkpoints/30"),
    "checksums missing": bad(after(remove(SUMS), resume()), "SHA256SUMS"),
    "config.json that is not JSON": bad(after(overwrite("config.json", "{"), evaluate()), "config.json"),
    "config.json missing and another model": bad(after(remove("config.json"), resume("model.width=16")), "/vit"),
    "metrics damaged before the last line": bad(after(cut_metrics, resume()), "metrics.jsonl:2", "damaged"),
    "data.json that is not JSON": bad(after(overwrite("data.json", "{"), resume()), "data.json"),
    "data.json of other classes": bad(
        after(overwrite("data.json", '{"class_names": ["a", "b"]}'), predict(SEVEN)), "data.class_names", "['a', 'b']"
    ),
    "accepted.json damaged": bad(after(overwrite("accepted.json", '{"accept": 3}'), resume()), "accepted.json"),
}

FOREIGN = {
    "missing workdir": bad(command("evaluate", "--workdir", "no/such/run"), "no/such/run"),
    "run without a checkpoint": bad(after(remove("checkpoints"), evaluate()), "no checkpoint"),
    "start from another model's weights": bad(vit("model_init={lm}"), "head/kernel", "model"),
    "predict with a language model": bad(command("predict", "--workdir", "{lm}", SEVEN), "dcvit generate"),
    "generate with an image model": bad(command("generate", "--workdir", "{vit}", "--prompt", "def"), "language model"),
    **{
        f".npz: {kind}": bad(after(npz(kind), vit("model_init={folder}/weights.npz")), fact)
        for kind, fact in (("pickle", "weights.npz"), ("other model", "body/kernel"))
    },
    "workdir in use": bad(after(Workspace.lock, resume()), "/vit", "in use"),
    "workdir below a file": bad(after(file("file", ""), vit(workdir="{folder}/file/run")), "workdir", "/file/run"),
}

CHANGED = {
    "fewer steps than completed": bad(resume("total_steps=1", accept=("total_steps",)), "step 60", "1 steps"),
    "accept an unknown key": bad(resume(accept=("lrr",)), "--accept lrr", "'lr'"),
}

BAD_CHECKPOINTS = DAMAGED | FOREIGN | CHANGED
