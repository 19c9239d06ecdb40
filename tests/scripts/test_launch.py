"""The files in `scripts/launch`: the commands that a cluster runs with them, and what it does when they end."""

import math
import os
import re
import subprocess
import tomllib

import pytest
import reference_pages
import yaml
from markdown_pages import ROOT
from stand_ins import program

from dcvit.config import load as configs
from dcvit.runs.stop import SAVED

LAUNCH = ROOT / "scripts" / "launch"
JOBSETS = ["jobset_gpu", "jobset_tpu"]
FAILURES = [1, 2, 134, 137, 143]  # exit statuses in docs/fault_tolerance.md that are no preemption


def manifest(name):
    return yaml.safe_load((LAUNCH / f"{name}.yaml").read_text())


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(jobset):
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    return container


def action(jobset, status=None, condition=None):
    """Return what JobSet does after a pod ended with an exit status, or was disrupted, as its documentation says."""
    reason = "BackoffLimitExceeded"
    assert job_of(jobset)["backoffLimit"] == 0
    for rule in job_of(jobset)["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": []})
        conditions = [pattern["type"] for pattern in rule.get("onPodConditions", [])]
        assert codes.get("containerName", "dcvit") == container_of(jobset)["name"]
        if status in codes["values"] or condition in conditions:
            assert rule["action"] == "FailJob"
            reason = "PodFailurePolicy"
            break
    rules = jobset["spec"]["failurePolicy"]["rules"]
    return next((rule["action"] for rule in rules if reason in rule["onJobFailureReasons"]), "RestartJobSet")


def expand(word, variables):
    """Return a word of a container's arguments as its process gets it: the kubelet replaces $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word)


def parse(words):
    """Return the options of `dcvit train`, after a check of the config; the bucket is not asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("input_pipeline.stores.check_readable", lambda url: None)
        args, overrides = reference_pages.parsers()["train"].parse(words)
    configs.load(args.config, overrides)
    return args


@pytest.mark.parametrize("name", JOBSETS)
def test_jobset_restarts_after_a_preemption_without_limit_and_after_a_failure_with_one(name):
    jobset = manifest(name)
    assert action(jobset, SAVED) == action(jobset, condition="DisruptionTarget") == "RestartJobSetAndIgnoreMaxRestarts"
    assert {action(jobset, status) for status in FAILURES} == {"RestartJobSet"}
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert job_of(jobset)["template"]["spec"]["restartPolicy"] == "Never"  # the policy requires it


def test_pods_of_the_gpu_jobset_are_the_processes_of_one_run():
    jobset = manifest("jobset_gpu")
    job, name = job_of(jobset), jobset["metadata"]["name"]
    coordinator = jobset["spec"]["coordinator"]
    assert coordinator == {"replicatedJob": jobset["spec"]["replicatedJobs"][0]["name"], "jobIndex": 0, "podIndex": 0}
    (variable,) = container_of(jobset)["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
    found = []
    for index in range(job["completions"]):
        values = {variable["name"]: f"{name}-hosts-0-0.{name}", "JOB_COMPLETION_INDEX": str(index)}
        command, *words = [expand(word, values) for word in container_of(jobset)["args"]]
        assert command == "train"
        found.append(parse(words))
    (port,) = container_of(jobset)["ports"]
    assert {args.coordinator for args in found} == {f"dcvit-hosts-0-0.dcvit:{port['containerPort']}"}
    assert {args.num_processes for args in found} == {job["parallelism"]} == {len(found)}
    assert [args.process_id for args in found] == list(range(len(found)))


def test_tpu_jobset_has_a_pod_for_each_host_of_the_slice():
    jobset = manifest("jobset_tpu")
    job, container = job_of(jobset), container_of(jobset)
    command, *words = container["args"]
    assert command == "train"
    assert parse(words).coordinator is None  # JAX detects the slice
    topology = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    assert job["completions"] == job["parallelism"] == chips // container["resources"]["limits"]["google.com/tpu"]
    assert jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]


def test_nodes_of_skypilot_are_the_processes_of_one_run(tmp_path):
    task = manifest("skypilot")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [SAVED]
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program(tmp_path / ".venv" / "bin" / "python", 'printf "%s\\n" "$@"; exit 75', "/bin/bash")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    given = {"CONFIG": "vit_i1k:variant=DCViT-S/16", "WORKDIR": "/w w"}
    assert task["envs"].keys() == given.keys()
    for rank in ("0", "1"):
        env = {**os.environ, **nodes, **given, "SKYPILOT_NODE_RANK": rank}
        done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        assert done.returncode == SAVED
        unbuffered, module, name, *words = done.stdout.splitlines()
        args = parse(words)
        assert (unbuffered, module, name, args.config) == ("-u", "-m", "dcvit.train", given["CONFIG"])
        assert (args.coordinator, args.num_processes, args.process_id) == ("10.0.0.1:8476", 2, int(rank))


def test_the_image_is_built_from_all_that_the_package_contains():
    """Docker reads the patterns of Dockerfile.dockerignore in order: all files are left out, and these are not."""
    first, *others = [line for line in (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines() if line[0] != "#"]
    kept = {line[1:] for line in others if line[0] == "!"}
    assert first == "*"
    assert [line for line in others if line[0] != "!"] == ["**/__pycache__"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]}
    assert kept == needed | {*wheel["packages"]} | {*wheel["force-include"]}
    for extras in re.findall(r"EXTRAS=(\S+)", (LAUNCH / "Dockerfile").read_text()):
        assert {*extras.split(",")} <= project["project"]["optional-dependencies"].keys()
