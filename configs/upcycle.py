"""A trained ViT or language model with plain attention becomes a composed one, and trains on.

    dcvit train --config configs/upcycle.py:init=runs/plain --workdir runs/upcycled
    dcvit train --config configs/upcycle.py:init=runs/plain,static=true,steps=2000,lr=0.0003 --workdir W
    dcvit train --config configs/upcycle.py:init=runs/plain,compose=none --workdir W    (the baseline)

`init` is a workdir, or a checkpoint folder of one. The model, the data and the recipe are those of the run, with
compositions that start as the identity: at step 0 the model computes the function of the plain one. `compose`,
`branches`, `projection`, `gate`, `static`, `rank` and `groups` are fields of the model. The optimizer starts afresh.
The schedule of the learning rate, warm-up included, is repeated over `steps` steps with the peak `lr`; by default both
are those of the run. The seed is another than the run's, and so is the order of the data. `compose=none` trains the
plain model on in the same way, for comparison.

Weights of other origin have no data and no recipe. Upcycle them with one of these configs:

    dcvit train --config configs/transfer.py:init=vit_s16.npz,data_dir=~/pets,compose=both --workdir W
    dcvit train --config configs/lm_text.py:init=gpt2,data_dir=books,attention=dcmha --workdir W
"""

from ml_collections import ConfigDict

UNITS = ("steps", "epochs", "examples")


def get_config(
    init: str = "",
    compose: str | None = "both",
    branches: str = "qk",
    projection: bool = True,
    gate: bool = True,
    static: bool = False,
    rank: int = 2,
    groups: int = 1,
    steps: int = 0,
    lr: float = 0.0,
    seed: int | None = None,
    init_config: dict | None = None,
) -> ConfigDict:
    """Return the config of the run `init`, `init_config`, for a composed model; 0 and None are the run's values."""
    if not init:
        raise ValueError("give the run to start from: upcycle.py:init=WORKDIR")
    if init_config and not any(f"total_{unit}" in init_config for unit in UNITS):
        use = {"vit": "transfer.py:init={},compose=both", "lm": "lm_text.py:init={},attention=dcmha"}
        raise ValueError(
            f"init={init} are weights without data and recipe; upcycle them by "
            f"{use[init_config['model_name']].format(init)},data_dir=FOLDER"
        )
    if not init_config:
        raise ValueError(
            f"init={init} is no workdir of a run, nor a checkpoint in one; for weights of other origin use another "
            f"config with --config.model_init={init} --config.model_load.upcycle=True"
        )
    workdir = init.rstrip("/").rpartition("/checkpoints/")[0] or init.rstrip("/")
    config = ConfigDict(init_config)
    config.seed = (init_config["seed"] + 1) % 2**32 if seed is None else seed
    if steps:
        for unit in [unit for unit in UNITS if f"total_{unit}" in config]:
            del config[f"total_{unit}"]
        config.total_steps = steps
    config.lr = lr or config.lr

    for rules in ("wd_mults", "lr_mults"):  # pairs, which JSON writes as lists
        config[rules] = tuple(map(tuple, init_config[rules]))
    for data in [config.input.data, *(options.data for options in config.evals.values())]:
        if "{workdir}" in (data.get("tokenizer") or ""):  # a tokenizer that the run trained
            data.tokenizer = data.tokenizer.replace("{workdir}", workdir)

    branch_fields = {"branches": branches, "projection": projection, "gate": gate, "static": static}
    with config.ignore_type():
        config.model.update({"compose": compose, **branch_fields, "rank": rank, "groups": groups})
        config.model_init = init
        config.model_load = {"upcycle": compose is not None}
    return config
