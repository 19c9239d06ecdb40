"""Batches: deterministic, complete, resumable from any step, and equal for any number of threads and hosts."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from batches import assert_same_batches
from sources import ListSource

import input_pipeline as ip
from input_pipeline import shuffle
from input_pipeline.shuffle import Blocks

PP = 'pad(1)|random_crop(8)|flip_lr|value_range(-1, 1)|onehot(10)|keep("image", "labels")'


class Numbers(ListSource):
    """A source whose example i is the number i, and which knows the examples that were read."""

    def __init__(self, size, corrupt=()):
        super().__init__([{"image": np.int64(i)} for i in range(size)], corrupt)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def take(batches, n):
    return [batch["image"].tolist() for batch in itertools.islice(batches, n)]


def shares(batch_size, hosts):
    """The rows of each host in a batch."""
    return [range(i * batch_size // hosts, (i + 1) * batch_size // hosts) for i in range(hosts)]


@pytest.mark.parametrize(("size", "batch"), [(10, 5), (7, 3), (3, 8)])
def test_each_epoch_of_the_stream_is_a_permutation(size, batch):
    stream = np.concatenate(take(ip.train_batches(Numbers(size), "", batch, seed=3), 4 * size)).tolist()
    epochs = [stream[i : i + size] for i in range(0, 4 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size < 4 or len(set(map(tuple, epochs))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 3])
def test_stream_can_start_at_any_step(threads):
    source = ip.open_source("digits", split="train", limit=70)
    complete = list(itertools.islice(ip.train_batches(source, PP, 10, seed=1, threads=1), 15))  # two epochs
    for start, expected in enumerate(complete):
        assert_same_batches([expected], ip.train_batches(source, PP, 10, seed=1, start_step=start, threads=threads), 1)


def test_late_start_reads_no_earlier_examples():
    source = Numbers(10_000)
    (batch,) = take(ip.train_batches(source, "", 50, seed=1, start_step=10**6, threads=0), 1)
    assert sorted({*source.read}) == sorted({*batch})


def test_each_host_reads_only_its_share():
    hosts = 4
    sources = [Numbers(1000) for _ in range(hosts)]
    for rows, source in zip(shares(40, hosts), sources, strict=True):
        take(ip.train_batches(source, "", 40, seed=0, rows=rows, threads=0), 5)
    assert [len(set(source.read)) for source in sources] == [200 // hosts] * hosts


@pytest.mark.slow
def test_hosts_evaluate_every_example_once_in_the_same_number_of_batches():
    batch, hosts = 1000, 2
    source = ip.open_source("digits", split="test")
    many = [ip.eval_batches(source, "onehot(10)", batch, rows=rows) for rows in shares(batch, hosts)]
    joined = ({k: np.concatenate([part[k] for part in parts]) for k in parts[0]} for parts in zip(*many, strict=True))
    assert_same_batches(ip.eval_batches(source, "onehot(10)", batch), joined)


def test_invalid_rows_of_a_batch_are_refused():
    with pytest.raises(ip.InputError, match="not rows of a batch of 4"):
        next(ip.train_batches(Numbers(10), "", 4, seed=0, rows=[4]))


@pytest.mark.parametrize(
    ("rows", "blocks"), [([9, 2, 3], None), *((rows, Blocks(np.array([40, 30]), 30)) for rows in shares(16, 2))]
)
def test_rows_of_a_host_are_those_of_the_global_batch(rows, blocks):
    source = ip.open_source("digits", split="train", limit=70)
    source.source.blocks = blocks
    complete, part = (ip.train_batches(source, PP, 16, seed=2, start_step=20, rows=which) for which in (None, rows))
    assert_same_batches(({k: v[list(rows)] for k, v in batch.items()} for batch in complete), part, 2)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [7, 1000])
def test_evaluation_reads_every_example_once_and_masks_the_padding(batch):
    source = ip.open_source("digits", split="test")
    batches = list(ip.eval_batches(source, "onehot(10)", batch))
    mask = np.concatenate([b["_mask"] for b in batches])
    images = np.concatenate([b["image"] for b in batches])
    assert {len(b["image"]) for b in batches} == {batch}
    assert mask.sum() == len(source) == 360
    np.testing.assert_array_equal(images[mask > 0], source.images)
    assert not images[mask == 0].any()


class TestCorrupt:
    """Corrupt examples are errors, or are skipped and counted in the same way in every run."""

    def test_corrupt_example_is_an_error_by_default_and_is_named(self):
        for batches in (ip.train_batches(Numbers(9, {4}), "", 9, seed=0), ip.eval_batches(Numbers(9, {4}), "", 2)):
            with pytest.raises(ip.InputError, match="example 4: bad bytes"):
                list(itertools.islice(batches, 9))

    def test_skipped_example_is_replaced_by_the_next_readable_one_and_counted(self, caplog):
        skip = ip.CorruptPolicy("skip", 3)
        source, intact = Numbers(9, {3, 4, 8}), Numbers(9)
        got = list(itertools.islice(ip.train_batches(source, "", 4, seed=0, corrupt=skip), 9))
        expected = np.concatenate(take(ip.train_batches(intact, "", 4, seed=0), 9)).tolist()
        replaced = [{3: 5, 4: 5, 8: 0}.get(i, i) for i in expected]
        assert np.concatenate([b["image"] for b in got]).tolist() == replaced
        assert np.concatenate([b["_skipped"] for b in got]).tolist() == [{3: 2, 4: 1, 8: 1}.get(i, 0) for i in expected]
        assert sorted(caplog.messages) == [f"skipped example {i}: bad bytes" for i in (3, 4, 8)]

    def test_more_corrupt_examples_than_the_maximum_are_an_error(self):
        with pytest.raises(ip.InputError, match="more than corrupt_max=2 examples are corrupt, the last is example"):
            take(ip.train_batches(Numbers(9, {1, 2, 3}), "", 9, seed=0, corrupt=ip.CorruptPolicy("skip", 2)), 2)

    def test_evaluation_masks_a_skipped_example(self):
        batches = list(ip.eval_batches(Numbers(5, {0, 3}), "", 2, corrupt=ip.CorruptPolicy("skip")))
        assert [b["image"].tolist() for b in batches] == [[0, 1], [2, 0], [4, 0]]
        assert [b["_mask"].tolist() for b in batches] == [[0, 1], [1, 0], [1, 0]]

    def test_source_without_readable_examples_is_an_error(self):
        for batches in (ip.train_batches, ip.eval_batches):
            arguments = {"seed": 0} if batches is ip.train_batches else {}
            with pytest.raises(ip.InputError, match="none of the"):
                next(batches(Numbers(3, {0, 1, 2}), "", 2, corrupt=ip.CorruptPolicy("skip"), **arguments))


FLAT = {"image": np.zeros(2)}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            FLAT,
            {"image": np.zeros((2, 2))},
            r"of shape \(2,\) in one example and float64 of shape \(2, 2\) in example 1",
        ),
        (FLAT | {"file_name": b"a.jpg"}, FLAT, "'file_name' has dtype bytes"),
    ],
)
def test_examples_that_do_not_fit_in_one_batch_are_an_error(first, second, message):
    with pytest.raises(ip.InputError, match=message):
        next(ip.eval_batches(ListSource([first, second]), "", 2))


@pytest.mark.slow
def test_closed_stream_ends_its_threads():
    batches = ip.train_batches(Numbers(100), "", 10, seed=0, threads=3)
    next(batches)
    batches.close()
    for thread in threading.enumerate():
        if thread.name.startswith("input"):
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.slow
def test_a_stream_left_open_ends_with_the_process():
    code = (
        "import json, input_pipeline as ip\n"  # names of json outlive those of the library of the threads
        "json.stream = ip.train_batches(ip.open_source('digits'), '', 64, seed=0, threads=2)\n"
        "next(json.stream)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_seeds_give_different_orders_and_different_random_numbers():
    source = ip.open_source("digits", split="test", limit=50)
    batches = [next(ip.train_batches(source, 'keep("label")', 50, seed=seed, threads=0)) for seed in range(2)]
    assert batches[0]["label"].tolist() != batches[1]["label"].tolist()
    draws = [
        shuffle.example_rng(seed, epoch, index).random() for seed, epoch, index in itertools.product(range(3), repeat=3)
    ]
    assert len(set(draws)) == 27
    assert shuffle.example_rng(2, 1, 0).random() == shuffle.example_rng(2, 1, 0).random()


def test_permutation_is_fixed_because_runs_are_resumed_from_it():
    assert shuffle.permutation(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert len(set(shuffle.permutation(100_000, 5, 2).tolist())) == 100_000
