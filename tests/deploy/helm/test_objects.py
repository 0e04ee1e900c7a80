"""What the chart renders is what Kubernetes accepts, for every way to run it."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from tests.deploy.helm.chart import (
    CHART,
    Manifest,
    container,
    helm_executable,
    named,
    pods,
    render,
    render_texts,
    render_with_helm,
    role_of,
    running,
    templates_of,
)
from tests.deploy.helm.value_sets import VALUE_SETS

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

CRDS = Path(__file__).parent / "crds"
# Parsing a schema takes ten times as long as checking an object against it.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
# The oldest version that the chart says it supports, and a recent one.
KUBERNETES = ("1.30", "1.36")
every_value_set = pytest.mark.parametrize("name", VALUE_SETS)


def test_there_are_enough_value_sets() -> None:
    assert len(VALUE_SETS) >= 12


@every_value_set
def test_every_object_fits_its_schema(name: str) -> None:
    objects = render(VALUE_SETS[name])
    assert {"Deployment", "Service", "ConfigMap"} <= {item["kind"] for item in objects}
    for item in objects:
        validate(item)


def test_an_object_with_an_unknown_field_would_be_noticed() -> None:
    broken = named(render({}), "Deployment", "gateway")
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(broken)
    scaled = named(render(VALUE_SETS["keda"]), "ScaledObject", "gateway")
    scaled["spec"]["minReplicas"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate(scaled)


@every_value_set
def test_no_two_objects_have_one_name(name: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in render(VALUE_SETS[name])]
    assert len(names) == len(set(names))


@every_value_set
def test_each_pod_selector_matches_its_pods(name: str) -> None:
    objects = render(VALUE_SETS[name])
    labels = [template["metadata"]["labels"] for item in objects for template in templates_of(item)]
    selectors = [
        item["spec"]["selector"].get("matchLabels", item["spec"]["selector"])
        for item in objects
        if item["kind"] in ("Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "PodMonitor")
    ]
    assert selectors
    for selector in selectors:
        # Metrics are those of all groups; everything else is about one of them.
        found = sum(selector.items() <= pod.items() for pod in labels)
        assert found == 1 or (found > 1 and "pando/group" not in selector)


@every_value_set
def test_pods_mount_exactly_the_volumes_that_they_declare(name: str) -> None:
    specs = [template["spec"] for item in render(VALUE_SETS[name]) for template in templates_of(item)]
    assert len(specs) >= 4
    for spec in specs:
        mounted = {mount["name"] for each in _containers(spec) for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


@every_value_set
def test_no_container_can_write_its_image_or_gain_privileges(name: str) -> None:
    objects = render(VALUE_SETS[name])
    specs = [template["spec"] for template in pods(objects).values()] + [
        item["spec"] for item in objects if item["kind"] == "Pod"
    ]
    assert len(specs) >= 2
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for item in _containers(spec):
            assert item["securityContext"]["readOnlyRootFilesystem"] is True
            assert item["securityContext"]["allowPrivilegeEscalation"] is False
            assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_groups_that_scale_have_no_replicas_and_those_that_do_not_have_as_many_as_asked_for() -> None:
    for name, kind in (("groups-hpa", "HorizontalPodAutoscaler"), ("groups-keda", "ScaledObject")):
        objects = render(VALUE_SETS[name])
        target = named(objects, kind, "group")["spec"]["scaleTargetRef"]
        scaled = named(objects, target["kind"], "group")
        assert scaled["metadata"]["name"] == target["name"]
        assert "replicas" not in scaled["spec"]
    assert named(render(VALUE_SETS["groups-in-pods"]), "StatefulSet", "group")["spec"]["replicas"] == 4


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_replicas_are_left_to_the_autoscaler(name: str) -> None:
    objects = render(VALUE_SETS[name])
    for component in ("gateway", "tokenizer"):
        assert "replicas" not in named(objects, "Deployment", component)["spec"]
    assert named(render({}), "Deployment", "gateway")["spec"]["replicas"] == 1
    assert named(render({}), "Deployment", "tokenizer")["spec"]["replicas"] == 2


def test_the_autoscaler_averages_the_metrics_of_pods() -> None:
    metrics = named(render(VALUE_SETS["hpa"]), "HorizontalPodAutoscaler", "gateway")["spec"]["metrics"]
    by_pods = [metric["pods"] for metric in metrics if metric["type"] == "Pods"]
    assert [metric["target"]["type"] for metric in by_pods] == ["AverageValue"]


@pytest.mark.parametrize(("mode", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_both_autoscalers_wait_before_they_remove_replicas(mode: str, kind: str) -> None:
    scaling = {"mode": mode, "minReplicas": 2, "maxReplicas": 9, "cooldownSeconds": 77}
    values = {"tokenizer": {"autoscaling": scaling}, "groups": {"layout": "together", "autoscaling": scaling}}
    scalers = [item["spec"] for item in render(values) if item["kind"] == kind]
    assert len(scalers) == 2
    for spec in scalers:
        scaler = spec if mode == "hpa" else spec["advanced"]["horizontalPodAutoscalerConfig"]
        assert scaler["behavior"]["scaleDown"] == {"stabilizationWindowSeconds": 77}
        # KEDA applies it only on the way to zero replicas.
        assert "cooldownPeriod" not in spec


def test_pods_of_a_group_share_a_node_and_ranks_of_a_pod_its_gpus() -> None:
    together = pods(render(VALUE_SETS["four-pods-on-a-node"]))["worker"]
    [term] = together["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= together["metadata"]["labels"].items()
    assert container(together)["resources"]["limits"]["amd.com/gpu"] == "1"
    [single] = [
        each.container for each in running(render(VALUE_SETS["two-ranks-in-a-pod"])) if each.service == "worker"
    ]
    assert single["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "deploy.ranks" in single["command"]


def test_groups_of_each_role_scale_by_the_metrics_of_their_own_pods() -> None:
    objects = render(VALUE_SETS["roles"])
    sets = {role_of(item): item for item in objects if item["kind"] == "StatefulSet"}
    scalers = {role_of(item): item["spec"] for item in objects if item["kind"] == "ScaledObject"}
    assert sets.keys() == scalers.keys() == {"prefill", "decode"}
    bounds = {role: (spec["minReplicaCount"], spec["maxReplicaCount"]) for role, spec in scalers.items()}
    assert bounds == {"prefill": (1, 4), "decode": (3, 12)}
    measured = {}
    for role, spec in scalers.items():
        assert spec["scaleTargetRef"]["name"] == sets[role]["metadata"]["name"]
        assert "replicas" not in sets[role]["spec"]
        queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
        measured[role] = {query.removeprefix("sum(").partition("{")[0] for query in queries}
        for query in queries:
            pods_of = re.compile(query.partition('pod=~"')[2].partition('"')[0])
            matching = [name for name, item in sets.items() if pods_of.fullmatch(f"{item['metadata']['name']}-0")]
            assert matching == [role]
    kv, waiting, rows = (f"pando_scheduler_{name}" for name in ("kv_usage_percent", "waiting_requests", "running_rows"))
    assert measured == {"prefill": {kv, waiting}, "decode": {kv, rows}}


def test_groups_of_each_role_have_replicas_gpus_and_nodes_of_their_own() -> None:
    objects = render(VALUE_SETS["roles-over-nodes"])
    over_nodes = {role_of(item): item["spec"] for item in objects if item["kind"] == "LeaderWorkerSet"}
    pods_of = {role: spec["leaderWorkerTemplate"]["size"] for role, spec in over_nodes.items()}
    assert pods_of == {"prefill": 4, "decode": 2}
    assert {role: spec.get("replicas") for role, spec in over_nodes.items()} == {"prefill": 1, "decode": None}
    racks = [item for item in objects if "leaderworkerset.sigs.k8s.io/exclusive-topology" in annotations_of(item)]
    assert [role_of(item) for item in racks] == ["prefill"]
    separate = [item["metadata"]["name"] for item in objects if item["kind"] == "StatefulSet"]
    names = [f"demo-pando-both-{name}{group}" for name in ("scheduler", "worker") for group in ("", "-group-1")]
    assert sorted(separate) == sorted(names)
    workers = [each for each in running(objects) if each.service == "worker"]
    assert {each.container["resources"]["limits"]["nvidia.com/gpu"] for each in workers} == {"4"}


def annotations_of(item: Manifest) -> Manifest:
    found: Manifest = item["metadata"].get("annotations") or {}
    return found


def test_a_dead_pod_of_a_group_over_nodes_restarts_the_whole_group() -> None:
    template = named(render(VALUE_SETS["leader-worker-set"]), "LeaderWorkerSet", "group")["spec"]
    assert template["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert template["leaderWorkerTemplate"]["size"] == 2


@pytest.mark.parametrize(
    "name",
    [
        "defaults",
        "several-gateways",
        "three-groups",
        "groups-keda",
        "example-h100",
        "example-h200-two-nodes",
        "model-from-s3",
        "given-issuer",
    ],
)
def test_rendered_as_before(name: str, snapshot: SnapshotAssertion) -> None:
    texts = render_texts(VALUE_SETS[name])
    # What an operator reads and Grafana draws has tests of its own, and would drown the rest.
    kept = [texts[template].strip() for template in sorted(texts) if not template.endswith("monitoring.yaml")]
    assert "\n".join(text for text in kept if text) == snapshot


@pytest.mark.skipif(helm_executable() is None, reason="no helm here; the SDK renders by the same code")
@every_value_set
def test_the_real_helm_renders_the_same(name: str) -> None:
    def ordered(objects: list[Manifest]) -> list[str]:
        return sorted(json.dumps(item, sort_keys=True) for item in objects)

    assert ordered(render_with_helm(VALUE_SETS[name])) == ordered(render(VALUE_SETS[name]))


def test_the_test_hook_asks_for_a_completion() -> None:
    hook = named(render({}), "Pod", "test")
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "test"
    compile(hook["spec"]["containers"][0]["args"][0], "hook", "exec")
    service = named(render({}), "Service", "gateway")
    expected = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert expected in hook["spec"]["containers"][0]["args"]


def test_each_component_is_documented_in_the_defaults() -> None:
    text = (CHART / "values.yaml").read_text()
    assert set(yaml.safe_load(text)) == set(json.loads((CHART / "values.schema.json").read_text())["properties"]) - {
        "global"
    }


def validate(item: Manifest) -> None:
    """Check an object against Kubernetes' own schema, or ours for what is no part of Kubernetes."""
    _validate(json.dumps(item))


@cache
def _validate(text: str) -> None:
    # Most objects are the same in many value sets, and the schemas are large.
    item: Manifest = json.loads(text)
    group = item["apiVersion"].partition("/")[0]
    schema = CRDS / f"{item['kind'].lower()}.json"
    if schema.exists():
        content: Any = json.loads(schema.read_text())
        jsonschema.Draft202012Validator(content).validate(item)
        return
    assert "." not in group or group.endswith("k8s.io"), f"no schema for {item['kind']} of {group}"
    for version in KUBERNETES:
        kubernetes_validate.validate(item, version, strict=True)


def _containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]
