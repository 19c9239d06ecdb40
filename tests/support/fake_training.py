"""A stand-in for `dcvit train` that writes the files of complete runs, and times of steps that are not measured."""

import json
from pathlib import Path

from dcvit.config.load import load
from dcvit.reproduction import speeds


def write_run(workdir, record, metrics):
    """Write the files of a complete run: its config and metrics of its last step."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(record))
    rows = [{"step": 0, "num_params": 7}, {"step": record["total_steps"], **metrics}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class FakeTraining:
    """Stands in for `dcvit train`: writes the files of a run whose metrics are `metrics(arm, config)`.

    `arm` names the folder of the workdir and that above it. `calls` has the arm, the workdir's name and the config of
    each run, and `statuses` the exit status of the call of a number, from 1, that fails.
    """

    def __init__(self, metrics):
        self.metrics, self.calls, self.statuses = metrics, [], {}

    def __call__(self, words):
        workdir = Path(words[3])
        config = load(words[1], [word.removeprefix("--config.") for word in words[4:]])
        arm = "/".join(workdir.parts[-3:-1])
        self.calls.append((arm, workdir.name, config))
        if status := self.statuses.pop(len(self.calls), 0):
            return status
        record = json.loads(config.to_json())
        if config.model_name == "lm" and config.input.data.kind == "stdlib":
            record["model"]["context"] = config.input.data.context  # as the data sets it
        write_run(workdir, record, self.metrics(arm, config))
        return 0


def set_times(monkeypatch, ms_of):
    """Set the milliseconds of a step by arm, which are not measured."""

    def times(configs, folder):
        return speeds.StepTimes({name: ms_of(name) for name in configs}, "a machine")

    monkeypatch.setattr(speeds, "step_times", times)
