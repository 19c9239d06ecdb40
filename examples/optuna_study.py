"""Search for learning rate, weight decay and number of heads with Optuna, on scikit-learn's digits.

    pip install -e ".[train]" optuna
    python examples/optuna_study.py --folder runs/study

A trial is a short training run; every evaluation is reported to Optuna, whose pruner stops runs that are worse than the
median of the earlier ones. Trials and their parameters are in FOLDER/study.db, the runs in FOLDER/trialN. The same
command continues a study that was killed: the trial that was running resumes from its latest checkpoint, and the
following parameters are those of an uninterrupted study. Only one process may work on a folder.

The search is for the accuracy on a fifth of the training images; no trial sees the test images.
"""

import argparse
from pathlib import Path

import optuna
from optuna.trial import TrialState

import dcvit

METRIC = "validation/top1"
RANDOM_TRIALS = 4  # before the sampler learns from the results
UNFINISHED = (TrialState.RUNNING, TrialState.FAIL)  # the states of a trial that a kill, or an exception, has ended


def objective(trial: optuna.Trial, folder: Path, config: str, steps: int) -> float:
    """Train with the parameters that Optuna suggests, or resume that run, and return the accuracy after it."""
    heads = trial.suggest_categorical("num_heads", [2, 4, 8])
    data, interval = {"kind": "digits", "split": "train"}, max(1, steps // 6)
    validation = {
        "type": "classification", "data": {**data, "part": (0.8, 1.0)}, "batch_size": 96, "log_steps": interval,
        "pp": 'value_range(-1, 1)|onehot(10)|keep("image", "labels")',
    }  # fmt: skip
    overrides = {
        "lr": trial.suggest_float("lr", 3e-4, 1e-2, log=True), "wd": trial.suggest_float("wd", 1e-5, 1e-3, log=True),
        "model": {"width": 32, "depth": 1, "mlp_dim": 64, "num_heads": heads}, "total_steps": steps,
        "input": {"data": {"part": (0.0, 0.8)}}, "evals": str({"validation": validation}),
        "ckpt_steps": interval, "log_steps": interval, "tensorboard": False,
    }  # fmt: skip
    stored = trial.study.trials[trial.number]
    known = stored.intermediate_values  # of the interrupted trial that this one continues

    def report(step: int, row: dict) -> None:
        if step and METRIC in row and step not in known:
            trial.report(row[METRIC], step)
            if trial.should_prune():
                raise optuna.TrialPruned

    workdir = folder / f"trial{stored.user_attrs.get('run', trial.number)}"
    try:
        return dcvit.train(config, workdir, on_row=report, **overrides).metrics[-1][METRIC]
    except FloatingPointError as e:  # the run diverged
        raise optuna.TrialPruned(str(e)) from None


def retry_interrupted(study: optuna.Study) -> None:
    """Enqueue each interrupted trial again, with its parameters, the values that it had reported, and its run."""
    continued = {trial.user_attrs.get("continues") for trial in study.trials}
    for trial in study.get_trials(states=UNFINISHED):
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        if trial.number not in continued:
            again = {
                "params": trial.params, "distributions": trial.distributions,
                "intermediate_values": trial.intermediate_values,
                "user_attrs": {"continues": trial.number, "run": trial.user_attrs.get("run", trial.number)},
            }  # fmt: skip
            study.add_trial(optuna.create_trial(state=TrialState.WAITING, **again))


def finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Return the trials that reached their end or were pruned."""
    return study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))


def search(folder: Path, config: str, trials: int, steps: int) -> optuna.Study:
    """Run a study, or continue it, until it has a number of finished trials."""
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="digits", storage=f"sqlite:///{folder.absolute()}/study.db", load_if_exists=True,
        direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=steps // 3),
    )  # fmt: skip
    retry_interrupted(study)
    while (count := len(finished(study))) < trials:
        # A sampler of its own for each trial: the state of a sampler is not in the database.
        study.sampler = optuna.samplers.TPESampler(seed=count, n_startup_trials=RANDOM_TRIALS)
        study.optimize(lambda trial: objective(trial, folder, config, steps), n_trials=1)
    return study


def _percent(value: float | None) -> str:
    """Return an accuracy in percent, or a dash for a trial that diverged before it had one."""
    return "–" if value is None else f"{value:.2%}"


def main(argv: list[str] | None = None) -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the database and of all runs")
    parser.add_argument("--config", default="vit_digits", help="vit_digits, with :argument=value,…")
    parser.add_argument("--trials", type=int, default=8, help="number of trials, pruned ones included")
    parser.add_argument("--steps", type=int, default=300, help="steps of a trial")
    args = parser.parse_args(argv)
    study = search(args.folder, args.config, args.trials, args.steps)
    for trial in finished(study):
        last = max(trial.intermediate_values, default=0)
        shown = ", ".join(f"{name} {value:.3g}" for name, value in trial.params.items())
        print(f"trial {trial.number}: {trial.state.name.lower()}, {_percent(trial.value)} after {last} steps, {shown}")
    best = study.best_trial
    print(f"best: trial {best.number}, {best.value:.2%}, {best.params}")


if __name__ == "__main__":
    main()
