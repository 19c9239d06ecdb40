"""Training: setup, tasks, optimizer, step, trainer and hooks, resuming.

Commands need the whole extra `train`; benchmarks of steps only the libraries of it that flax brings, too.
"""

from input_pipeline.optional import FROM_FLAX, require_extra

require_extra("train", FROM_FLAX)
