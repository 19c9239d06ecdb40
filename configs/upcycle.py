"""A trained ViT or language model with plain attention becomes a composed one, and trains on.

    dcvit train --config configs/upcycle.py:init=runs/plain --workdir runs/upcycled
    dcvit train --config configs/upcycle.py:init=runs/plain --workdir W --config.model.static=True --config.lr=3e-4
    dcvit train --config configs/upcycle.py:init=runs/plain,attention=mha --workdir W    (the baseline)

`init` is a workdir, or a checkpoint folder of one. The model, the data and the recipe are those of the run, with
compositions that start as the identity: at step 0 the model computes the function of the plain one. They are those of
the paper; --config.model.compose, branches, projection, gate, static, rank and groups select others. The optimizer
starts afresh. The schedule of the learning rate, warm-up included, is repeated with the length and the peak of the run,
which --config.total_steps and --config.lr set. The seed is another than the run's, and so is the order of the data.
`attention=mha` trains the plain model on in the same way, for comparison.

Measured on two CPU cores, with a model of width 64 on Python's standard library: 200 steps after 400 plain ones reach
2.610 ± 0.074 bits per byte, and with `attention=mha` 2.718 ± 0.064 (five seeds; docs/evidence.csv, `upcycle`).

Weights of other origin have no data and no recipe. Upcycle them with one of these configs:

    dcvit train --config configs/transfer.py:init=vit_s16.npz,data_dir=pets,attention=dcmha --workdir W
    dcvit train --config configs/lm_text.py:init=gpt2,data_dir=books,attention=dcmha --workdir W
"""

from ml_collections import ConfigDict

from dcvit.hub.source import init_config
from dcvit.models.head_settings import with_attention

UNITS = ("steps", "epochs", "examples")
BRANCHES = {"branches": "qk", "projection": True, "gate": True, "static": False, "rank": 2, "groups": 1}


def get_config(init: str = "", attention: str = "dcmha") -> ConfigDict:
    """Return the config of the run `init`, with the `attention` of a name of docs/heads.md."""
    if not init:
        raise ValueError("give the run to start from: upcycle.py:init=WORKDIR")
    run = init_config(init)
    if run and not any(f"total_{unit}" in run for unit in UNITS):
        use = {"vit": "transfer.py", "lm": "lm_text.py"}[run["model_name"]]
        raise ValueError(
            f"init={init} are weights without data and recipe; upcycle them by "
            f"{use}:init={init},attention=dcmha,data_dir=FOLDER"
        )
    if not run:
        raise ValueError(
            f"init={init} is no workdir of a run, nor a checkpoint in one; for weights of other origin use another "
            f"config with --config.model_init={init} --config.model_load.upcycle=True"
        )
    workdir = init.rstrip("/").rpartition("/checkpoints/")[0] or init.rstrip("/")
    config = ConfigDict(run)
    config.seed = (run["seed"] + 1) % 2**32

    for rules in ("wd_mults", "lr_mults"):  # pairs, which JSON writes as lists
        config[rules] = tuple(map(tuple, run[rules]))
    for data in [config.input.data, *(options.data for options in config.evals.values())]:
        if "{workdir}" in (data.get("tokenizer") or ""):  # a tokenizer that the run trained
            data.tokenizer = data.tokenizer.replace("{workdir}", workdir)

    with config.ignore_type():
        fields = with_attention(run["model"], attention)
        config.model = fields if "heads" in fields else {**BRANCHES, **fields}
        config.model_init = init
        config.model_load = {"upcycle": attention != "mha"}
    return config
