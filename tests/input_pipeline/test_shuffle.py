"""The order of examples and their random numbers as functions of seed, epoch and index."""

import itertools

import input_pipeline as ip
from input_pipeline import shuffle


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
