"""Models, kernels, logs, keys and locks are on volumes where the settings look for them, and that last long enough."""

from __future__ import annotations

import copy

import pytest

from common.models import BUNDLED_MODELS, pull
from common.settings import Settings
from services.worker import pull as worker_pull
from tests.deploy.helm.chart import (
    INDEX_LABELS,
    Running,
    component_of,
    mounted_secret,
    pods,
    render,
    running,
    settings_of,
    templates_of,
)
from tests.deploy.helm.value_sets import VALUE_SETS


@pytest.mark.parametrize("reference", [*BUNDLED_MODELS, "gpt2", "org/model"])
def test_only_bundled_models_are_not_downloaded(reference: str) -> None:
    objects = render({"model": {"reference": reference}})
    names = {item["name"] for each in running(objects) for item in each.template["spec"].get("initContainers", [])}
    assert ("model" in names) == (reference not in BUNDLED_MODELS)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_models_are_where_the_settings_say(name: str) -> None:
    objects = render(VALUE_SETS[name])
    reference = Settings(**settings_of(objects, "tokenizer")).model.reference
    whole_model, of_stages = (["python", "-m", f"{module}.pull"] for module in ("common.models", "services.worker"))
    for each in running(objects):
        mounts = [mount["mountPath"] for mount in each.container["volumeMounts"]]
        needs_model = each.section in ("tokenizer", "detokenizer", "worker")
        assert ("/models" in mounts) == (needs_model and "/" in reference)
        environment = {entry["name"]: entry.get("value") for entry in each.container["env"]}
        is_cached = needs_model and "/" in reference and not reference.startswith("/")
        assert (environment.get("HF_HOME"), environment.get("HF_HUB_OFFLINE")) == (
            ("/models", "1") if is_cached else (None, None)
        )
        for fetching in [item for item in each.template["spec"].get("initContainers", []) if item["name"] == "model"]:
            assert reference in fetching["args"]
            weights_too = component_of(each.workload) in ("worker", "encoder", "group")
            without = {"--no-weights", "--exclude=*.safetensors"} & set(fetching["args"])
            assert bool(without) == (not weights_too)
            if is_cached:
                assert {"name": "HF_HOME", "value": "/models"} in fetching["env"]
                assert fetching["command"] in ([whole_model, of_stages] if weights_too else [whole_model])
                if fetching["command"] == whole_model:
                    assert pull.parse(fetching["args"]).model == reference


def test_pods_with_some_stages_of_a_model_download_only_their_files() -> None:
    objects = render(VALUE_SETS["example-stages-two-nodes"])
    templates = {component_of(template): template for item in objects for template in templates_of(item)}
    scheduler = next(each for each in running(objects) if each.service == "scheduler").settings.scheduler
    for number, component in enumerate(("group", "worker")):
        [fetching] = [item for item in templates[component]["spec"]["initContainers"] if item["name"] == "model"]
        [rank] = [item for item in fetching["env"] if item["name"] == "POD_INDEX"]
        assert rank["valueFrom"]["fieldRef"]["fieldPath"] == INDEX_LABELS["LeaderWorkerSet"]
        assert fetching["command"] == ["python", "-m", "services.worker.pull"]
        assert fetching["image"].rpartition("/")[2].startswith("pando-worker-cuda:")
        arguments = worker_pull.parse([each.replace("$(POD_INDEX)", str(number)) for each in fetching["args"]])
        assert arguments.model == "Qwen/Qwen3-235B-A22B"
        assert arguments.pipeline_parallel == scheduler.pipeline_parallel == 2
        assert arguments.tensor_parallel * arguments.pipeline_parallel == len(scheduler.workers)
        stages = worker_pull.stages_of(arguments.pod, arguments.ranks_per_pod, arguments.tensor_parallel)
        assert list(stages) == [number]


def test_they_download_all_files_where_a_stage_needs_others_too() -> None:
    values = copy.deepcopy(VALUE_SETS["example-stages-two-nodes"])
    values["settings"]["model"] = {"classifier_from_token": ["no", "yes"]}
    in_one_pod = {"worker": {"pipelineParallel": 2}, "model": {"reference": "Qwen/Qwen3-8B"}}
    for changed in (values, in_one_pod):
        fetching = next(item for item in pods(render(changed))["group"]["spec"]["initContainers"])
        assert (fetching["name"], fetching["command"]) == ("model", ["python", "-m", "common.models.pull"])


def test_workers_on_gpus_can_keep_the_kernels_that_they_compile() -> None:
    # The file system of the image cannot be written.
    for name, source in (("two-ranks-in-a-pod", "persistentVolumeClaim"), ("groups-keda", "emptyDir")):
        [worker] = [each for each in running(render(VALUE_SETS[name])) if each.service == "worker"]
        [mount] = [mount for mount in worker.container["volumeMounts"] if mount["mountPath"] == "/cache"]
        [volume] = [volume for volume in worker.template["spec"]["volumes"] if volume["name"] == mount["name"]]
        assert source in volume


def test_audit_log_keyring_and_responses_are_on_volumes_that_survive_the_pods() -> None:
    objects = render(VALUE_SETS["state-on-volumes"])
    by_service = {each.service: each for each in running(objects)}
    scheduler, gateway = by_service["scheduler"], by_service["gateway"]
    storage = scheduler.settings.scheduler.storage
    assert storage.keyring is not None
    assert claim_at(scheduler, str(storage.keyring)) == "demo-pando-keyring"
    assert mounted_secret(scheduler, storage.secret) == ("keyring", "secret")
    assert gateway.settings.gateway.responses.file is not None
    assert claim_at(gateway, str(gateway.settings.gateway.responses.file)) == "responses"
    # Two gateways would write to the file during an update.
    assert gateway.workload["spec"]["strategy"] == {"type": "Recreate"}
    for each in (scheduler, gateway):
        assert each.settings.audit.directory is not None
        assert claim_at(each, f"{each.settings.audit.directory}/gateway") == "demo-pando-audit"
    assert all(
        each.settings.audit.directory is None
        for name, each in by_service.items()
        if name in ("tokenizer", "detokenizer", "worker")
    )
    claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
    assert all(claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for claim in claims)
    assert [(claim["metadata"]["name"], claim["spec"]["accessModes"]) for claim in claims] == [
        ("demo-pando-audit", ["ReadWriteMany"]),
        ("demo-pando-keyring", ["ReadWriteMany"]),
    ]


def claim_at(each: Running, path: str) -> str:
    """Return the claim whose volume has the directory of a file, which the container may write."""
    [mount] = [mount for mount in each.container["volumeMounts"] if mount["mountPath"] == path.rpartition("/")[0]]
    assert not mount.get("readOnly")
    [volume] = [volume for volume in each.template["spec"]["volumes"] if volume["name"] == mount["name"]]
    return str(volume["persistentVolumeClaim"]["claimName"])


@pytest.mark.parametrize(
    ("name", "claim", "takers"),
    [("device-turns", "turns", {"scheduler", "worker"}), ("example-shared-gpu", "demo-pando-turns", {"group"})],
)
def test_models_that_take_turns_share_locks_and_a_node(name: str, claim: str, takers: set[str]) -> None:
    objects = render(VALUE_SETS[name])
    claims = {item["metadata"]["name"] for item in objects if item["kind"] == "PersistentVolumeClaim"}
    assert (claim in claims) == (name == "example-shared-gpu")
    label = {"pando/device-turns": claim}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": label}}
    found = {
        component for component, pod in pods(objects).items() if label.items() <= pod["metadata"]["labels"].items()
    }
    assert found == takers
    for component in takers:
        pod = pods(objects)[component]["spec"]
        assert pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == [term]
        volume = {"name": "turns", "persistentVolumeClaim": {"claimName": claim}}
        assert volume in pod["volumes"]
    sharing = [each for each in running(objects) if each.service in ("scheduler", "worker")]
    assert len(sharing) == 2
    for each in sharing:
        turns = each.settings.scheduler.device_turns
        assert turns.enabled
        assert {"name": "turns", "mountPath": str(turns.directory)} in each.container["volumeMounts"]
    assert {each.settings.scheduler.device_turns.level for each in sharing} == {2 if name == "device-turns" else 1}
