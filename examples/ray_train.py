"""Training with Ray Train on the hosts of a Ray cluster; resumes after a worker or a host is lost.

    pip install "ray[train]"
    python examples/ray_train.py --config vit_i1k:variant=DCViT-S/16 --workdir gs://bucket/run --workers 2 --gpus 8
    python examples/ray_train.py --config vit_i1k:variant=DCViT-S/16 --workdir gs://bucket/run --workers 4 \
        --tpu TPU-V6E --topology 4x4

A worker is one process of the run, and drives all GPUs or TPU chips of its host. The workdir is a folder that all hosts
share, or a bucket; it has the checkpoints and metrics, not Ray's storage. After a failure Ray starts all workers again,
and the run resumes from its latest checkpoint.
"""

import argparse
import socket

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer

from dcvit.config import load as configs


def train_worker(options):
    """Train in a worker; Ray calls this function again in all workers after one of them was lost."""
    import jax  # not in the driver, which would take the TPUs of its host

    from dcvit import training

    if not jax.distributed.is_initialized():  # JaxTrainer connects the workers on TPUs and GPUs only
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
        context = get_context()
        jax.distributed.initialize(
            broadcast_from_rank_zero(address), context.get_world_size(), context.get_world_rank()
        )
    training.train(options["config"], options["workdir"], **options["overrides"])


def train(config, workdir, scaling, failures=20, **overrides):
    """Train on a Ray cluster; return Ray's result.

    Args:
      config, workdir: as for `dcvit.training.train`.
      scaling: the number of workers and their resources, a `ray.train.ScalingConfig`.
      failures: how often Ray starts the workers again; -1 means any number.
      **overrides: keys of the config with values as on the command line.
    """
    configs.load(config, [f"{key}={value}" for key, value in overrides.items()])  # an error here is not tried again
    options = {"config": config, "workdir": workdir, "overrides": overrides}
    run_config = RunConfig(failure_config=FailureConfig(max_failures=failures))
    trainer = JaxTrainer(train_worker, train_loop_config=options, scaling_config=scaling, run_config=run_config)
    return trainer.fit()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--workers", type=int, required=True, help="number of hosts")
    parser.add_argument("--gpus", type=int, help="of a host; by default the workers use CPUs")
    parser.add_argument("--tpu", metavar="TYPE", help="such as TPU-V6E, with --topology")
    parser.add_argument("--topology", help="of the TPU slice, such as 4x4")
    parser.add_argument("--failures", type=int, default=20, help="how often Ray starts the workers again")
    parser.epilog = "Further options are those of the config, such as --config.lr=0.01."
    args, words = parser.parse_known_args(argv)
    if wrong := [word for word in words if not (word.startswith("--config.") and "=" in word)]:
        parser.error(f"expected --config.KEY=VALUE, found {wrong[0]}")
    overrides = dict(word.removeprefix("--config.").partition("=")[::2] for word in words)
    chips = {}
    if args.gpus:
        chips = {"use_gpu": True, "resources_per_worker": {"GPU": args.gpus}}
    elif args.tpu:
        chips = {"use_tpu": True, "accelerator_type": args.tpu, "topology": args.topology}
    train(args.config, args.workdir, ScalingConfig(num_workers=args.workers, **chips), args.failures, **overrides)


if __name__ == "__main__":
    main()
