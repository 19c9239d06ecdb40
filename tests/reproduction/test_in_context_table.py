"""Tables 5 and 11 and Figure 6: shots and seeds of runs become rows, and examples are those of the tasks."""

import pytest
from fake_training import write_run

from dcvit.reproduction import in_context
from dcvit.reproduction.seeded import run_checksum, stored
from input_pipeline.text import synthetic_tasks

ACCURACY = {"plain": 0.5, "DCMHA": 0.75}


@pytest.fixture
def runs(tmp_path):
    """Complete runs of both models with seeds 0 and 1, whose accuracy grows by 0.01 a shot and 0.02 a seed."""
    for name, accuracy in ACCURACY.items():
        for seed in (0, 1):
            folder = tmp_path / name / f"seed{seed}"
            write_run(folder, {"total_steps": 5, "seed": seed}, {in_context.METRIC: accuracy + 0.02 * seed})
            measured = {"validation": {"accuracy": accuracy + 0.02 * seed, "perplexity": 4.0}}
            for shots in range(in_context.SHOTS + 1):
                value = {"accuracy": accuracy + 0.02 * seed + 0.01 * shots, "perplexity": 3.0}
                measured[f"validation/{shots}-shot"] = value
            stored(folder / "shots.json", run_checksum(folder), lambda value=measured: value)
    return tmp_path


def test_table_5_has_means_of_seeds_beside_the_paper(runs):
    plain, composed = in_context.table5(runs, [0, 1], 5).rows
    assert (plain["model"], composed["model"]) == ("plain", "DCMHA")
    assert (plain["accuracy %"], composed["accuracy %"]) == pytest.approx((51.0, 76.0))
    assert composed["± 95 %"] == pytest.approx(100 * 0.01 * 12.706, rel=1e-3)  # t of one degree of freedom
    assert (plain["accuracy %, paper"], composed["accuracy %, paper"]) == (31.9, 39.0)


def test_table_11_has_each_pattern_and_relation_with_the_answer_of_the_facts():
    rows = in_context.table11().rows
    expected = {(task.pattern, task.relation) for task in synthetic_tasks.TASKS}
    assert {(row["pattern"], row["relation"]) for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        facts = [fact.split() for fact in row["example"].rpartition(" .")[0].split(" . ")]
        if row["relation"] == "the" and row["pattern"] in ("first", "last"):
            assert row["answer"] == facts[0 if row["pattern"] == "first" else -1][-1]
        elif row["pattern"] == "same" and row["relation"] == "the":
            (thing,) = [thing for person, thing in facts if person == row["example"].split()[-2]]
            assert row["answer"] == thing
