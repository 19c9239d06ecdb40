"""Training: setup, tasks, optimizer, step, trainer and hooks, resuming. It needs the extra `train`."""

from input_pipeline.optional import require_extra

require_extra("train")
