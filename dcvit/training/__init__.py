"""Training: setup, tasks, optimizer, step, trainer and hooks, resuming.

Commands need the whole extra `train`; benchmarks of steps only the libraries of it that flax brings, too.
"""

from input_pipeline.optional import require_extra

require_extra("train", ("optax", "orbax", "tensorstore"))
