"""Pairs of ViTs: they differ in composition alone, and a verdict follows from the interval of the difference."""

import pytest
from fake_training import FakeTraining
from markdown_pages import ROOT

from dcvit.config.load import load
from dcvit.hub.kinds import make_model
from dcvit.reproduction import images
from dcvit.reproduction.images import Experiment
from dcvit.reproduction.seeded import train_all

EXPERIMENTS = [found for found in vars(images).values() if isinstance(found, Experiment)]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_models_of_a_pair_differ_in_one_field_alone(experiment, tmp_path):
    key, *expected = ("dtype_mm", "float32", "bfloat16") if "bfloat16" in experiment.name else ("compose", None, "both")
    for pair, runs in experiment.runs(tmp_path, 7).items():
        loaded = [load(run.spec, [*run.words(3), "num_classes=10"]) for run in runs.values()]
        assert [getattr(make_model(config), key) for config in loaded] == expected
        if pair.startswith("K="):
            assert {make_model(config).num_key_heads for config in loaded} == {int(pair.removeprefix("K="))}
        configs = [config.to_dict() for config in loaded]
        assert [config["model"].pop(key) for config in configs] == expected
        assert configs[0] == configs[1]
        assert (configs[0]["total_steps"], configs[0]["seed"]) == (7, 3)


def test_a_table_pairs_seeds_and_needs_all_of_them(tmp_path):
    top1 = {"K=1/plain": 0.5, "K=1/composed": 0.6, "K=2/composed": 0.405}  # half a point is too little
    train = FakeTraining(lambda arm, config: {"test/top1": top1.get(arm, 0.4) + 0.02 * config.seed})
    assert train_all(images.DIGITS.plan(tmp_path, 7), [0, 1], train) == 0
    table = images.DIGITS.table(tmp_path, [0, 1], 7)
    plain, composed, *others = table.rows
    assert (plain["model"], plain["difference"], plain["verdict"]) == ("K=1 plain", None, "–")
    assert plain["top-1 %"] == pytest.approx(51)
    assert composed["difference"] == pytest.approx(10)
    assert composed["verdict"] == "gain"
    assert len(others) == 6
    assert {row["verdict"] for row in others} == {"–", "not shown"}


def test_the_results_on_the_page_are_those_that_the_commands_wrote():
    results = (ROOT / "docs" / "images.md").read_text().split("\n## Results\n")[1]
    written = "".join(path.read_text() for path in (ROOT / "docs" / "reproduction").glob("*.md")).splitlines()
    rows = [line for line in results.splitlines() if line.startswith("|")]
    assert {*rows} <= {*written}
    for experiment in EXPERIMENTS:
        published = (ROOT / "docs" / "reproduction" / f"{experiment.name}.md").exists()
        assert published != (f"`{experiment.name}`: not measured" in results), experiment.name
