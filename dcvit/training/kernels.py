"""Kernels of a command: verdicts on them before it opens the devices, and one selection for a whole run.

The shapes of calls of attention are found by a child process, which opens the devices, traces the programs of a config
or of a model, and ends. `dcvit.dcmha.check` then checks the kernels of each case in further children.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from dcvit.config.load import load
from dcvit.dcmha import check
from dcvit.dcmha.check import Case, ChildError
from dcvit.dcmha.plan import VARIABLE, Policy, Selection, default_policy, selecting
from dcvit.errors import EXPECTED, ConfigError
from dcvit.evaluators import rounded_batch_size
from dcvit.hub.open import open_model
from dcvit.models import Params
from dcvit.models.trees import param_shapes
from dcvit.parallel import multihost, runtime
from dcvit.runs.files import folder
from dcvit.runs.identity import Facts, Record
from dcvit.training.evaluation import open_evaluators, predictor
from dcvit.training.setup import load_setup, make_setup
from dcvit.training.step import trace
from dcvit.versions import cluster_size
from input_pipeline import MissingDataError, MissingLibraryError

LOG = logging.getLogger(__name__)
LISTING = "from dcvit.training.kernels import main; main()"  # prints the environment and the cases of a request


def check_first(args: argparse.Namespace, *requests: Mapping[str, object], policy: Policy | None = None) -> None:
    """Check the kernels that have no verdict on this machine's accelerator, before the command opens the devices.

    Nothing happens on a machine without accelerator, if the policy is not "verify", and in a run of several processes:
    these read the verdicts of process 0.

    Args:
      args: the options of `dcvit.parallel.multihost.add_options`.
      *requests: arguments of `cases_of_config` or `cases_of_model`, as JSON data.
      policy: `config.kernels`.
    """
    if (policy or os.environ.get(VARIABLE) or "verify") != "verify" or not has_accelerator() or not _is_alone(args):
        return
    for request in requests:
        LOG.info("tracing the programs, to check their kernels")
        try:
            listed = check.run_child(LISTING, request, check.SECONDS)
        except ChildError as e:
            LOG.warning("attention: kernels are not checked: %s", e)
            continue
        if isinstance(listed, dict):  # an error, which the command itself meets and shows
            continue
        environment, cases = listed
        table = check.read(environment)
        found = [Case(*each) for each in cases]
        missing = [case for case in found if case.candidates.keys() - table.get(case.key, {}).keys()]
        for number, case in enumerate(missing, 1):
            LOG.info("checking the kernels of attention, %d of %d: %s", number, len(missing), case.label)
            check.examine(case, environment)


def main() -> None:
    """Read a request from stdin, and print as JSON the environment and the cases of its programs, or an error."""
    request = json.load(sys.stdin)
    runtime.configure()
    try:
        runtime.check_devices()
        with selecting(Selection(verdicts={})) as selection:
            (cases_of_model if "place" in request else cases_of_config)(**request)
    except EXPECTED as e:
        print(json.dumps({"error": str(e)}))
        return
    print(json.dumps([check.environment(jax.local_devices()[0]), [*selection.cases.values()]]))


def cases_of_config(config: str, overrides: Sequence[str]) -> None:
    """Trace the training step of a config, and its evaluators if their data is there."""
    try:
        setup = make_setup(load(config, overrides))
    except (MissingDataError, MissingLibraryError):
        setup = load_setup(config, overrides, stand_in=True)
    trace(setup)
    _trace_evaluators(setup.model.module, setup.model.shapes, setup.model.mesh, setup.evaluators)


def cases_of_model(
    place: str | None, checkpoint: str | None, config: str | None, overrides: Sequence[str],
    image_size: Sequence[int] | None,
) -> None:  # fmt: skip
    """Trace the evaluators of a model; the arguments are the options of `dcvit evaluate`."""
    given = None if config is None else load(config, overrides)
    size = (image_size[0], image_size[1]) if image_size else None
    other = checkpoint and folder(checkpoint)
    opened = open_model(place and folder(place), config=given, checkpoint=other, overrides=overrides, image_size=size)
    mesh, _, evaluators = open_evaluators(opened)
    for evaluator in [*evaluators.values()][:1]:
        _trace_evaluators(opened.module, param_shapes(opened.module, evaluator.data.example), mesh, evaluators)


def _trace_evaluators(module: nn.Module, shapes: Params, mesh: Mesh, evaluators: Mapping[str, Any]) -> None:
    """Trace the model for a batch of each evaluator."""
    for evaluator in evaluators.values():
        example, size = evaluator.data.example, rounded_batch_size(evaluator.options.batch_size, mesh)
        with jax.set_mesh(mesh):
            jax.eval_shape(predictor(module), shapes, jax.ShapeDtypeStruct((size, *example.shape[1:]), example.dtype))


def has_accelerator() -> bool:
    """Return True if this machine shows a TPU, or a GPU that JAX may use; initializes no backend."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen and not {"cuda", "gpu", "tpu"} & {*chosen.split(",")}:
        return False
    plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return runtime.has_tpu() or (plugins and any(Path("/dev").glob("nvidia[0-9]*")))


def _is_alone(args: argparse.Namespace) -> bool:
    """Return True in a run of one process; no process is connected yet."""
    if args.num_processes is not None:
        return bool(args.num_processes == 1)
    try:
        return not multihost.in_cluster() and (not multihost.on_tpu_vm() or cluster_size() == 1)
    except Exception:  # the detection failed: the command itself says so where it needs it
        return False


def select(policy: Policy | None, about: Facts) -> Selection:
    """Return the object that selects the kernel of each attention call in a run, by the verdicts of process 0.

    Args:
      policy: `config.kernels`; None means the environment variable DCVIT_KERNELS, or else "verify".
      about: description of the checkpoint to resume from; empty for a new run. Its selection is reused if it was made
        on devices of the same kind by the same software.

    Raises:
      ConfigError: the processes of the run have different policies.
    """
    policy, before = policy or default_policy(), about.get("kernels", {})
    environment = check.environment(jax.local_devices()[0])
    verdicts = check.read(environment) if multihost.is_first() else {}
    same = before.get("environment") == environment
    found = multihost.gather("kernels", {"policy": policy, "same": same, "verdicts": verdicts})
    if len(policies := {each["policy"] for each in found}) > 1:
        raise ConfigError(f"processes differ in {VARIABLE}: {' and '.join(sorted(policies))}; expected one for all")
    chosen = dict(before["chosen"]) if found[0]["same"] else {}
    return Selection(policy, chosen=chosen, verdicts=found[0]["verdicts"])


def record(selection: Selection) -> Record:
    """Return a checkpoint's entry, from which a resumed run restores the selection; later choices are added to it."""
    return {"environment": check.environment(jax.local_devices()[0]), "chosen": selection.chosen}
