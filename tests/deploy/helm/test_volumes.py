"""Models, kernels, logs, keys and locks are on volumes where the settings look for them, and that last long enough."""

from __future__ import annotations

import pytest

from common.models import pull
from common.settings import Settings
from tests.deploy.helm.chart import (
    Running,
    component_of,
    mounted_secret,
    pods,
    render,
    running,
    settings_of,
)
from tests.deploy.helm.value_sets import VALUE_SETS


@pytest.mark.parametrize("name", VALUE_SETS)
def test_models_are_where_the_settings_say(name: str) -> None:
    objects = render(VALUE_SETS[name])
    reference = Settings(**settings_of(objects, "tokenizer")).model.reference
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
                arguments = [*fetching["command"], *fetching["args"]]
                assert arguments[:3] == ["python", "-m", "common.models.pull"]
                assert pull.parse(arguments[3:]).model == reference


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
