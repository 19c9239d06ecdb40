"""Errors while examples are read: which are skipped, and which end the run."""

import json
from pathlib import Path

import image_datasets
import numpy as np
import pytest
from sources import ListSource

import input_pipeline as ip

NUMBERS = [{"image": np.int64(index)} for index in range(12)]


def streams(source, **options):
    """Functions that read all batches of training and of evaluation."""
    yield lambda: [b for _, b in zip(range(4), ip.train_batches(source, "", 4, seed=0, **options), strict=False)]
    yield lambda: list(ip.eval_batches(source, "", 4, **options))


ERRORS = {
    "OSError: [Errno 5] Input/output error": OSError(5, "Input/output error"),
    "ValueError: the first line": ValueError("the first line\nand another"),
}


class TestErrors:
    @pytest.mark.parametrize("message", ERRORS)
    def test_errors_that_are_not_of_the_data_name_the_example_and_are_never_skipped(self, message):
        source = ListSource(NUMBERS, {5}, error=ERRORS[message])
        for stream in streams(source, corrupt=ip.CorruptPolicy("skip"), threads=3):
            with pytest.raises(ip.ReadingError) as error:
                stream()
            assert str(error.value) == f"example 5: {message}"

    @pytest.mark.parametrize("threads", [0, 2])
    def test_interrupts_pass_through(self, threads):
        for stream in streams(ListSource(NUMBERS, {5}, error=KeyboardInterrupt()), threads=threads):
            with pytest.raises(KeyboardInterrupt):
                stream()

    def test_missing_file_is_not_skipped(self, tmp_path):
        image_datasets.image_folder(tmp_path, train=4, val=1)
        source = ip.open_source("folder", data_dir=str(tmp_path))
        missing = source.describe(7)
        Path(missing).unlink()
        stream = ip.train_batches(
            source, "decode(precise=True)|resize_pillow(8)", 12, 0, corrupt=ip.CorruptPolicy("skip")
        )
        with pytest.raises(ip.ReadingError, match=f"{missing}: No such file"):
            next(stream)

    def test_error_of_an_op_is_skipped_only_if_its_data_is_invalid(self, caplog):
        def odd(image):
            return ListSource([{"image": np.zeros((4, 4, 3), np.uint8)}] * 5 + [{"image": image}])

        corrupt = ip.CorruptPolicy("skip")
        with pytest.raises(ip.ReadingError, match="example 5: resize_pillow: 'image' should be"):
            list(ip.eval_batches(odd("text"), "resize_pillow(2)", 4, corrupt=corrupt))
        small = odd(np.zeros((1, 1, 3), np.uint8))
        assert sum(batch["_mask"].sum() for batch in ip.eval_batches(small, "random_crop(2)", 4, corrupt=corrupt)) == 5
        assert "skipped example 5" in caplog.text


class TestBatchIds:
    @pytest.mark.parametrize("step", [0, 7])
    def test_batch_ids_are_those_of_the_batch(self, step):
        source = ListSource(NUMBERS[:10])
        batch = next(ip.train_batches(source, "", 4, seed=3, start_step=step))
        rows = ip.batch_ids(source, 4, 3, step)
        assert [row["index"] for row in rows] == batch["image"].tolist()
        assert [row["id"] for row in rows] == [f"example {index}" for index in batch["image"]]
        assert [(row["row"], row["epoch"]) for row in rows] == [(i, (step * 4 + i) // 10) for i in range(4)]
        json.dumps(rows)
