"""Training as a job of submitit, which puts itself back into Slurm's queue before its time limit.

    pip install submitit
    python examples/submitit_train.py --nodes 2 --hours 12 --partition gpu -- \
        --config vit_i1k:variant=DCViT-S/16 --workdir /scratch/dcvit/s16 --config.ckpt_steps=500

Each task of the job runs `dcvit train` in a process of its own, which finds the other tasks by Slurm's environment.
Before the time limit submitit asks for a checkpoint: the run saves its step and exits, and the job is requeued.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys

import submitit

from dcvit.runs.stop import SAVED


class Train:
    """A job that runs `dcvit train` with some words; the requeued job resumes the run of its workdir."""

    def __init__(self, *words):
        self.words, self.process = words, None

    def __call__(self):
        """Train, and return the exit status: 0, or 75 if Slurm preempts the job, which it requeues by itself."""
        handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the child shall ignore submitit's signal, too
        self.process = subprocess.Popen([sys.executable, "-u", "-m", "dcvit.train", *self.words])
        signal.signal(signal.SIGUSR2, handler)
        signal.signal(signal.SIGTERM, lambda *_: self.process.terminate())  # submitit ignores it
        status = self.process.wait()
        if status not in (0, SAVED):
            raise RuntimeError(f"dcvit train ended with status {status}")
        return status

    def checkpoint(self):
        """Let the run save its step, and return the job that submitit puts into the queue."""
        if self.process:
            self.process.terminate()
            with contextlib.suppress(ChildProcessError):  # it has ended before
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # while `wait` is interrupted
        return submitit.helpers.DelayedSubmission(Train(*self.words))


def submit(words, cluster=None, folder="submitit", **parameters):
    """Submit a job; `cluster="local"` runs it on this machine."""
    executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=1000)
    executor.update_parameters(name="dcvit", **parameters)
    return executor.submit(Train(*words))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs, and tasks, of a node")
    parser.add_argument("--hours", type=float, default=24, help="time limit; the requeued job has the same again")
    parser.add_argument("--partition")
    parser.add_argument("words", nargs="+", metavar="OPTION", help="options of dcvit train, after --")
    args = parser.parse_args(argv)
    gpus = {"gpus_per_node": args.gpus, "tasks_per_node": args.gpus, "cpus_per_task": 8}
    # JAX assigns the i-th visible GPU to task i of a node, so every task must see all GPUs of its node.
    slurm = {"slurm_srun_args": ["--gpu-bind=none"], "slurm_signal_delay_s": 120, "slurm_partition": args.partition}
    job = submit(args.words, nodes=args.nodes, timeout_min=round(60 * args.hours), **gpus, **slurm)
    print(f"job {job.job_id}, log: {job.paths.stdout}")


if __name__ == "__main__":
    main()
