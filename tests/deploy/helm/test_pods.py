"""Pods fit the services that they run: settings, health names, ports, and time to end."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.limits import load_limits
from common.settings import SchedulerSettings, Settings
from common.settings.scheduler import DataParallelSettings, HostTierSettings
from deploy.supervisor.command import read_roles
from deploy.supervisor.layout import ON_GPUS, PlannedGroup, Replicas, plan_layout
from services.detokenizer.__main__ import DRAIN_S as DETOKENIZER_DRAIN_S
from services.tokenizer.__main__ import DRAIN_S as TOKENIZER_DRAIN_S
from tests.deploy.helm.chart import (
    INDEX_LABELS,
    SERVICES,
    WORKLOADS,
    Manifest,
    Running,
    component_of,
    container,
    group_of,
    host_of,
    mounted_secret,
    named,
    pods,
    render,
    render_texts,
    role_of,
    running,
    selected,
    settings_of,
    templates_of,
)
from tests.deploy.helm.value_sets import ENCODERS, VALUE_SETS

if TYPE_CHECKING:
    from collections.abc import Iterator


every_value_set = pytest.mark.parametrize("name", VALUE_SETS)


@every_value_set
def test_the_services_accept_the_rendered_settings(name: str) -> None:
    for each in running(render(VALUE_SETS[name])):
        ports = {port["containerPort"] for port in each.container["ports"]}
        section = getattr(each.settings, each.section)
        if each.service == "gateway":
            probe_port = {each.settings.rpc.probe_port} if section.tls.client_authority else set()
            assert ports == {section.port, section.metrics_port} | probe_port
            continue
        assert {int(section.address.rpartition(":")[2]), section.metrics_port} <= ports


@every_value_set
def test_no_two_containers_of_a_pod_share_a_port_or_its_name(name: str) -> None:
    by_pod: dict[tuple[str, str], list[Manifest]] = {}
    for each in running(render(VALUE_SETS[name])):
        ports = by_pod.setdefault((each.workload["metadata"]["name"], component_of(each.template)), [])
        ports += each.container["ports"]
        probe = each.container["livenessProbe"].get("grpc")
        if probe and each.settings.rpc.probe_port:
            assert probe["port"] == each.settings.rpc.probe_port
            ports.append({"name": f"probe {each.service}", "containerPort": probe["port"]})
    for ports in by_pod.values():
        for key in ("name", "containerPort"):
            values = [port[key] for port in ports]
            assert len(values) == len(set(values))


@every_value_set
def test_every_address_is_that_of_a_service_of_the_release(name: str) -> None:
    objects = render(VALUE_SETS[name])
    services = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "Service"}
    gateway = Settings(**settings_of(objects, "gateway")).gateway
    assert gateway.schedulers == Settings(**settings_of(objects, "tokenizer")).tokenizer.schedulers
    schedulers = [each for each in running(objects) if each.service == "scheduler"]
    assert {each.settings.scheduler.detokenizer for each in schedulers} == {gateway.detokenizer}
    [found] = {host_of([address]) for address in gateway.schedulers}
    assert selected(objects, found) == {each.workload["metadata"]["name"] for each in schedulers}
    for address in (*gateway.tokenizer, *gateway.detokenizer, *gateway.schedulers):
        host, _, port = address.removeprefix("dns:").partition(":")
        assert int(port) in [each["port"] for each in services[host]["ports"]]
        # A name stands for all pods only where the service has no address of its own.
        assert (services[host].get("clusterIP") == "None") == address.startswith("dns:")


def test_gateways_get_the_address_of_their_state_and_its_failure_mode() -> None:
    plain = next(each for each in running(render(VALUE_SETS["several-gateways"])) if each.service == "gateway")
    assert plain.settings.gateway.state.url is not None
    assert plain.settings.gateway.state.url.get_secret_value() == "rediss://state.example:6380/2"
    assert plain.settings.gateway.state.failure == "closed"
    assert mounted_secret(plain, plain.settings.gateway.state.secret) == ("signing", "secret")
    secret = next(each for each in running(render(VALUE_SETS["hpa"])) if each.service == "gateway")
    assert mounted_secret(secret, secret.settings.gateway.state.url) == ("state", "url")
    assert secret.settings.gateway.state.secret is None
    alone = next(each for each in running(render({})) if each.service == "gateway")
    assert alone.settings.gateway.state.url is None


def test_schedulers_and_tokenizers_get_the_state_of_their_fleet() -> None:
    members = {"tokenizer", "scheduler"}
    seen = set()
    for each in running(render(VALUE_SETS["groups-in-pods"])):
        seen.add(each.service)
        assert (each.settings.fleet.state is not None) == (each.service in members), each.service
        if each.service in members:
            assert mounted_secret(each, each.settings.fleet.state) == ("fleet", "url")
            assert mounted_secret(each, each.settings.fleet.secret) == ("fleet", "secret")
    assert members < seen


@every_value_set
def test_the_scheduler_knows_every_rank_in_order(name: str) -> None:
    everybody = running(render(VALUE_SETS[name]))
    schedulers = [each for each in everybody if each.service == "scheduler"]
    # The first ranks of each group: a LeaderWorkerSet has the others in pods of another kind.
    workers = [
        each
        for each in everybody
        if each.service == "worker"
        and not (each.workload["kind"] == "LeaderWorkerSet" and component_of(each.template) == "worker")
    ]
    assert len(schedulers) == len(workers) == VALUE_SETS[name].get("groups", {}).get("replicas", 1) or any(
        each.template is worker.template for each in schedulers for worker in workers
    )
    for scheduler, worker in zip(schedulers, workers, strict=True):
        assert list(scheduler.settings.scheduler.workers) == addresses_of(worker)
        # Another group's workers have other labels.
        assert group_of(scheduler) == group_of(worker)


def addresses_of(worker: Running) -> list[str]:
    """Return where the ranks or encoders of a group are, as Kubernetes names its pods."""
    set_name, spec = worker.workload["metadata"]["name"], worker.workload["spec"]
    ranks = [port for port in worker.container["ports"] if "metrics" not in port["name"]]
    if worker.workload["kind"] == "LeaderWorkerSet":
        # Of the first group, whose first pod has the encoders. Pods that are groups know themselves.
        is_group = len(templates_of(worker.workload)) == 1
        size = 1 if is_group or worker.service == "encoder" else spec["leaderWorkerTemplate"]["size"]
        hosts = [f"{set_name}-0", *(f"{set_name}-0-{pod}" for pod in range(1, size))]
    else:
        assert spec["serviceName"] == set_name
        # A pod that is a whole group knows itself.
        is_group = component_of(worker.workload) == "group"
        hosts = [f"{set_name}-{pod}" for pod in range(1 if is_group else spec["replicas"])]
    return [f"{host}.{set_name}.llm.svc:{rank['containerPort']}" for host in hosts for rank in ranks]


@every_value_set
def test_each_scheduler_knows_the_encoders_of_its_group_and_no_other_does(name: str) -> None:
    everybody = running(render(VALUE_SETS[name]))
    encoders = {group_of(each): each for each in everybody if each.service == "encoder"}
    assert bool(encoders) == (name in ENCODERS)
    for each in everybody:
        own = encoders.get(group_of(each)) if each.service == "scheduler" else None
        assert list(each.settings.scheduler.encoders) == ([] if own is None else addresses_of(own))


def test_a_groups_encoders_are_those_of_pando_up() -> None:
    planned = plan_layout(Settings(), Path("/run"), 1, Replicas(encoders=2)).find("scheduler").settings.scheduler
    for name in ("encoders", "encoders-in-pods"):
        for each in running(render(VALUE_SETS[name])):
            if each.service == "scheduler":
                assert len(set(each.settings.scheduler.encoders)) == len(planned.encoders) == 2
                assert not set(each.settings.scheduler.encoders) & set(each.settings.scheduler.workers)


def test_each_encoder_has_a_device_and_the_workers_values_unless_it_has_its_own() -> None:
    apart, together = (
        [each for each in running(render(VALUE_SETS[name])) if each.service == "encoder"]
        for name in ("encoders", "encoders-in-pods")
    )
    assert [each.workload["spec"]["replicas"] for each in apart] == [2, 2]
    for each in apart:
        spec, limits = each.template["spec"], each.container["resources"]["limits"]
        assert (limits["nvidia.com/mig-1g.10gb"], spec["nodeSelector"]) == ("1", {"pool": "slices"})
        assert "nvidia.com/gpu" not in limits
        assert (spec["runtimeClassName"], spec["tolerations"][0]["key"]) == ("nvidia", "nvidia.com/gpu")
        assert "podAffinity" not in spec.get("affinity", {})
    [sidecar] = together
    # The kubelet gives each container GPUs of its own, and each process takes the next one.
    assert sidecar.container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert sidecar.container["command"][2:5] == ["deploy.ranks", "--ranks", "2"]
    assert sidecar.container["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}


def test_a_group_is_ready_and_drains_without_its_encoders() -> None:
    [sidecar] = [each for each in running(render(VALUE_SETS["encoders-in-pods"])) if each.service == "encoder"]
    assert sidecar.container["restartPolicy"] == "Always"
    assert "readinessProbe" not in sidecar.container
    # The scheduler's container starts once the sidecars have.
    assert sidecar.container["startupProbe"]["grpc"]["service"] == ""
    order = [item["name"] for item in sidecar.template["spec"]["initContainers"]]
    assert order == ["model", "worker", "encoder"]


def test_groups_without_encoders_render_as_if_there_were_none() -> None:
    role = [each for each in running(render(VALUE_SETS["encoders-of-roles"])) if group_of(each)[0] == "decode"]
    assert {each.service for each in role} == {"scheduler", "worker"}


def test_metrics_of_encoders_are_read() -> None:
    for name, component, names in (
        ("encoders", "encoder", ["metrics"]),
        ("encoders-in-pods", "group", ["metrics", "rank-metrics-0", "enc-metrics-0", "enc-metrics-1"]),
    ):
        objects = render(VALUE_SETS[name])
        monitor = named(objects, "PodMonitor", component)["spec"]
        assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == names
        pod = pods(objects)[component]
        assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        assert set(names) <= {port["name"] for each in containers for port in each.get("ports", [])}


def test_groups_of_each_role_are_configured_as_by_pando_up() -> None:
    objects = render(VALUE_SETS["roles"])
    groups = {role_of(each.workload): each for each in running(objects) if each.service == "scheduler"}
    chosen = read_roles("prefill=1x2,decode=1x1")
    settings = Settings(scheduler=SchedulerSettings(host_tier=HostTierSettings(gigabytes=16)))
    layout = plan_layout(settings, Path("/run"), 1, Replicas(groups=chosen))
    for index, group in enumerate(chosen):
        planned = layout.find(f"scheduler-{index}").settings.scheduler
        own = groups[group.role.value].settings.scheduler
        same = ("role", "host_tier", "prefill_min_tokens", "pipeline_parallel", "expert_parallel")
        assert {name: getattr(own, name) for name in same} == {name: getattr(planned, name) for name in same}
        assert len(own.workers) == len(planned.workers) == group.tp
    assert len(groups) == len(chosen) == 2
    assert [groups[role].settings.scheduler.max_rows for role in ("prefill", "decode")] == [256, 512]
    # Workers serve as long as their scheduler drains.
    drains = {(role_of(each.workload), each.settings.scheduler.drain_s) for each in running(objects)
              if each.service in ("scheduler", "worker")}  # fmt: skip
    assert drains == {("prefill", 60), ("decode", 300)}


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("data-parallel", "StatefulSet", 3), ("data-parallel-over-nodes", "LeaderWorkerSet", 16)],
)
def test_groups_that_share_experts_are_configured_as_by_pando_up(name: str, kind: str, count: int) -> None:
    objects = render(VALUE_SETS[name])
    schedulers = [each for each in running(objects) if each.service == "scheduler"]
    settings = Settings(scheduler=SchedulerSettings(data_parallel=DataParallelSettings(size=count)))
    layout = plan_layout(settings, Path("/run"), 1, Replicas(groups=(PlannedGroup(),) * count))
    planned = layout.find("scheduler-0").settings.scheduler
    # All pods are alike, also the first one of a LeaderWorkerSet.
    [each] = schedulers
    own = each.settings.scheduler
    assert (own.data_parallel.size, own.data_parallel.rank) == (count, planned.data_parallel.rank) == (count, 0)
    assert len(own.workers) == len(planned.workers) == 1
    # All meet at the worker of the first group.
    assert own.data_parallel.rendezvous == "demo-pando-group-0.demo-pando-group.llm.svc:29556"
    assert own.workers[0] == "demo-pando-group-0.demo-pando-group.llm.svc:50053"
    [rank] = [item for item in each.container["env"] if item["name"] == "PANDO_SCHEDULER__DATA_PARALLEL__RANK"]
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == INDEX_LABELS[kind]
    assert {item["name"] for item in each.template["spec"]["initContainers"]} >= {"worker"}
    workload = named(objects, kind, "group")["spec"]
    assert workload.get("leaderWorkerTemplate", {}).get("size", workload["replicas"]) == count
    # None is replaced alone: it would wait for the others, which have other weights.
    if kind == "StatefulSet":
        assert workload["updateStrategy"] == {"type": "OnDelete"}
    else:
        assert workload["replicas"] == 1
        assert workload["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_values_of_a_role_may_be_false_or_zero() -> None:
    common = {"tensorParallel": 4, "ranksPerPod": 2, "expertParallel": True, "leaderWorkerSet": {"enabled": True}}
    own = {"ranksPerPod": 0, "expertParallel": False, "leaderWorkerSet": {"enabled": False}}
    objects = render({"worker": common, "groups": {"roles": {"both": {"worker": own}}}})
    [scheduler] = [each for each in running(objects) if each.service == "scheduler"]
    assert (scheduler.workload["kind"], scheduler.settings.scheduler.expert_parallel) == ("StatefulSet", False)
    assert len(scheduler.settings.scheduler.workers) == 4


def test_a_setting_of_a_role_replaces_only_its_groups() -> None:
    def annotations(changed: dict[str, Any]) -> dict[str | None, Any]:
        values = copy.deepcopy(VALUE_SETS["roles"])
        values["groups"]["roles"]["decode"].update(changed)
        sets = [item for item in render(values) if item["kind"] in WORKLOADS]
        return {item["metadata"]["name"]: templates_of(item)[0] for item in sets}

    before, after = annotations({}), annotations({"settings": {"scheduler": {"max_rows": 99}}})
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == ["demo-pando-decode-group"]


def test_a_group_in_a_pod_starts_its_workers_first_and_drains_before_they_end() -> None:
    objects = render(VALUE_SETS["groups-keda"])
    spec = pods(objects)["group"]["spec"]
    [fetch, worker], [scheduler] = spec["initContainers"], spec["containers"]
    # Kubernetes ends restartable init containers after all others.
    assert (fetch["name"], worker["name"], worker["restartPolicy"]) == ("model", "worker", "Always")
    assert "restartPolicy" not in fetch
    assert (scheduler["name"], worker["resources"]["limits"]["nvidia.com/gpu"]) == ("scheduler", "2")
    assert (spec["nodeSelector"], spec["runtimeClassName"]) == ({"pool": "gpu"}, "nvidia")
    assert "lifecycle" not in worker


def test_gateway_and_scheduler_share_the_admin_token() -> None:
    for name in ("keys-and-admin", "three-groups", "groups-keda"):
        everybody = running(render(VALUE_SETS[name]))
        for each in everybody:
            mounts = {mount["mountPath"] for mount in each.container["volumeMounts"]}
            assert ("/etc/pando/admin" in mounts) == (each.service in ("gateway", "scheduler"))
        for each in everybody:
            token = each.settings.scheduler.admin_token
            assert (token is not None) == (each.service in ("gateway", "scheduler"))
            assert token is None or token.get_secret_value() == "file:/etc/pando/admin/token"


def test_probes_ask_for_the_health_names_that_the_services_have() -> None:
    for each in [each for name in ("defaults", "groups-in-pods") for each in running(render(VALUE_SETS[name]))]:
        component, probes = each.service, each.container
        if component == "gateway":
            assert probes["livenessProbe"]["httpGet"]["path"] == "/health"
            assert probes["readinessProbe"]["httpGet"]["path"] == "/ready"
            continue
        # As the service registers itself, in its own source.
        health_name = importlib.import_module(f"services.{component}.__main__").NAME
        assert probes["readinessProbe"]["grpc"]["service"] == health_name
        assert probes["livenessProbe"]["grpc"]["service"] == ""
        assert probes["startupProbe"]["grpc"]["service"] in ("", health_name)


def test_probes_need_no_certificate_where_clients_do() -> None:
    [gateway] = [each for each in running(render(VALUE_SETS["clients-with-certificates"])) if each.service == "gateway"]
    ports = {port["name"]: port["containerPort"] for port in gateway.container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = gateway.container[probe]["httpGet"]
        assert (ports[asked["port"]], asked["scheme"]) == (gateway.settings.rpc.probe_port, "HTTP")
    assert gateway.settings.gateway.tls.client_authority is not None


def test_metrics_are_read_from_the_ports_at_which_they_are_served() -> None:
    objects = render(VALUE_SETS["monitoring"])
    [gateway] = [each for each in running(objects) if each.service == "gateway"]
    [endpoint] = named(objects, "PodMonitor", "gateway")["spec"]["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in gateway.container["ports"]}
    assert ports[endpoint["port"]] == gateway.settings.gateway.metrics_port
    # It is read by the pod's address alone: the Service may be open to the world.
    assert [port["targetPort"] for port in named(objects, "Service", "gateway")["spec"]["ports"]] == ["http"]


def test_a_gateway_without_keys_answers_for_the_names_it_has_in_the_cluster() -> None:
    def hosts(values: dict[str, Any]) -> tuple[str, ...]:
        return Settings(**settings_of(render(values), "gateway")).gateway.allowed_hosts

    service = "demo-pando-gateway"
    assert set(hosts({})) == {service, f"{service}.llm", f"{service}.llm.svc", f"{service}.llm.svc.cluster.local"}
    values = {"ingress": {"enabled": True, "hosts": ["llm.example", "*.llm.example"]}}
    assert set(hosts(values)) - set(hosts({})) == {"llm.example"}
    assert "other.example" in hosts({**values, "settings": {"gateway": {"allowed_hosts": ["other.example"]}}})


def test_the_gateways_probes_are_its_routes() -> None:
    from fastapi import APIRouter

    from gateway.endpoints import health

    router = APIRouter()
    health.add_routes(router, None)  # type: ignore[arg-type]  # only paths are asked for
    routes = {getattr(route, "path", "") for route in router.routes}
    probes = container(pods(render({}))["gateway"])
    asked = {probes[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert asked <= routes


def test_the_start_may_take_as_long_as_the_weights_need() -> None:
    probe = container(pods(render({"model": {"loadSeconds": 3601}}))["group"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3601


@every_value_set
def test_termination_grace_periods_exceed_pre_stop_and_drain_times(name: str) -> None:
    for each in running(render(VALUE_SETS[name])):
        hook = each.container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        constants = {"tokenizer": TOKENIZER_DRAIN_S, "detokenizer": DETOKENIZER_DRAIN_S}
        drain = getattr(getattr(each.settings, each.section), "drain_s", constants.get(each.service, 0))
        assert each.template["spec"]["terminationGracePeriodSeconds"] > hook["sleep"]["seconds"] + drain


def test_secrets_are_never_in_the_settings_file() -> None:
    objects = render(VALUE_SETS["keys-and-admin"])
    assert settings_of(objects, "gateway")["gateway"]["keys_file"] == "/etc/pando/keys/keys.toml"
    texts = [named(objects, "ConfigMap", f"{name}-settings")["data"]["pando.toml"] for name in ("gateway", *SERVICES)]
    secrets = re.findall('^ *(?:admin_token|token|secret) *= *"(.*)"', "\n".join(texts), re.MULTILINE)
    assert len(secrets) == 2
    assert all(secret.startswith("file:/etc/pando/") for secret in secrets)
    [mount] = [m for m in container(pods(objects)["group"])["volumeMounts"] if m["name"] == "admin"]
    assert settings_of(objects, "scheduler")["scheduler"]["admin_token"] == f"file:{mount['mountPath']}/token"


# Changed values, and the components whose pods are replaced.
ROLLS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a setting of the gateway": ({"settings": {"gateway": {"max_open_requests": 7}}}, {"gateway"}),
    "hosts of the ingress": ({"ingress": {"enabled": True, "hosts": ["llm.example"]}}, {"gateway"}),
    "keys of the API": ({"apiKeys": {"existingSecret": "keys"}}, {"gateway"}),
    "the time that gateways drain": ({"gateway": {"drainSeconds": 5}}, {"gateway"}),
    "the number of groups": ({"groups": {"replicas": 5}}, set()),
    "the number of tokenizers": ({"tokenizer": {"replicas": 5}}, set()),
    "who may connect": ({"networkPolicy": {"stateTo": [{"podSelector": {}}]}}, set()),
    "queues of workloads": ({"worker": {"labels": {"kueue.x-k8s.io/queue-name": "models"}}}, set()),
    "a setting of the tokenizer": ({"settings": {"tokenizer": {"routing": {"policy": "least_loaded"}}}}, {"tokenizer"}),
    "a setting of the scheduler": ({"settings": {"scheduler": {"max_rows": 7}}}, {"scheduler"}),
    "a setting of the worker": ({"settings": {"worker": {"keep_warm_ms": 7}}}, {"worker"}),
    "a setting of the model": (
        {"settings": {"model": {"max_context": 4096}}},
        {"tokenizer", "scheduler", "worker", "detokenizer"},
    ),
    "a setting of all": ({"settings": {"log": {"level": "debug"}}}, {"gateway", *SERVICES}),
    "the version": ({"image": {"tag": "9.9.9"}}, {"gateway", *SERVICES}),
}


@pytest.mark.parametrize(("values", "rolled"), ROLLS.values(), ids=ROLLS)
@pytest.mark.parametrize("layout", ["together", "separate"])
def test_a_change_replaces_only_the_pods_that_it_concerns(
    values: dict[str, Any], rolled: set[str], layout: str
) -> None:
    def templates(values: dict[str, Any]) -> dict[str, Manifest]:
        groups = {"layout": layout, **values.get("groups", {})}
        objects = render({**values, "groups": groups})
        return {item["metadata"]["name"]: template for item in objects for template in templates_of(item)}

    before, after = templates({}), templates(values)
    expected = {"group" if layout == "together" and name in ("scheduler", "worker") else name for name in rolled}
    # Further groups are new, and replace nothing.
    assert before.keys() <= after.keys()
    assert {component_of(before[name]) for name in before if before[name] != after[name]} == expected


def test_upgrades_replace_groups_one_after_the_other() -> None:
    together = named(render(VALUE_SETS["groups-in-pods"]), "StatefulSet", "group")["spec"]
    # Kubernetes' default for a StatefulSet: one pod at a time, each once the one before is ready.
    assert "updateStrategy" not in together
    over_nodes = named(render(VALUE_SETS["leader-worker-set"]), "LeaderWorkerSet", "group")["spec"]["rolloutStrategy"]
    assert over_nodes == {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0}}
    separate = [item for item in render(VALUE_SETS["separate"]) if item["kind"] == "StatefulSet"]
    assert [item["spec"]["updateStrategy"] for item in separate] == [{"type": "OnDelete"}] * 4


@pytest.mark.parametrize("name", ["groups-in-pods", "separate", "leader-worker-set"])
def test_workers_may_serve_as_long_as_their_scheduler_drains(name: str) -> None:
    everybody = running(render(VALUE_SETS[name]))
    drains = {
        each.service: each.settings.scheduler.drain_s for each in everybody if each.service in ("scheduler", "worker")
    }
    assert drains == {"scheduler": 60, "worker": 60}
    for each in everybody:
        if each.service in drains:
            assert each.template["spec"]["terminationGracePeriodSeconds"] > 60


def test_gpus_get_the_batch_of_pando_up_unless_the_values_say_otherwise() -> None:
    def batch(values: dict[str, Any]) -> dict[str, Any]:
        scheduler = Settings(**settings_of(render(values), "scheduler")).scheduler
        return {name: getattr(scheduler, name) for name in ON_GPUS}

    cuda = {"worker": {"device": "cuda"}}
    assert batch(cuda) == ON_GPUS
    assert batch({**cuda, "settings": {"scheduler": {"max_rows": 8}}}) == {**ON_GPUS, "max_rows": 8}
    assert batch({}) == {name: SchedulerSettings.model_fields[name].default for name in ON_GPUS}


@pytest.mark.parametrize("layout", ["together", "separate"])
def test_pods_with_gpus_name_a_runtime_class_only_if_the_values_do(layout: str) -> None:
    def classes(**worker: str) -> set[str | None]:
        objects = render({"worker": {"device": "cuda", **worker}, "groups": {"layout": layout}})
        return {each.template["spec"].get("runtimeClassName") for each in running(objects) if each.service == "worker"}

    assert classes() == {None}
    assert classes(runtimeClassName="nvidia") == {"nvidia"}


def test_components_have_volumes_labels_and_security_contexts_of_their_own() -> None:
    for each in running(render(VALUE_SETS["own-contexts"])):
        assert each.container["securityContext"]["runAsUser"] == 20_000
        assert each.container["securityContext"]["readOnlyRootFilesystem"] is True
        assert each.template["spec"]["securityContext"]["fsGroup"] == 20_000
        assert each.workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "models"
        mount = {"name": f"{each.service}-certificates", "mountPath": "/authorities", "readOnly": True}
        assert mount in each.container["volumeMounts"]
        assert mount["name"] in {volume["name"] for volume in each.template["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"reference": "Qwen/Qwen3-8B@v1.0:Q4_K_M"}, "Qwen/Qwen3-8B"),
        ({"reference": "Qwen/Qwen3-8B", "servedName": "qwen"}, "qwen"),
        ({"reference": "s3://models/qwen3-8b"}, "qwen3-8b"),
        ({"reference": "gs://models/team/qwen3-8b:Q4_K_M"}, "qwen3-8b"),
        ({"reference": "gpt2@main"}, "gpt2"),
        ({}, "smollm2-135m-instruct"),
    ],
)
def test_the_notes_name_the_model_as_it_is_served(model: dict[str, Any], name: str) -> None:
    values = {"model": model}
    assert f"serves {name} as" in render_texts(values)["pando/templates/NOTES.txt"]
    assert {each.settings.model.name for each in running(render(values)) if each.service in SERVICES} == {name}


def test_only_tokenizers_read_the_chat_template() -> None:
    template = '{% for message in messages %}\n{{ "\'" + message.content }}\n{% endfor %}'
    processes = running(render({"model": {"chatTemplate": template}}))
    found = {each.service: each.settings.model.chat_template for each in processes if each.service in SERVICES}
    assert found == {"tokenizer": template, "scheduler": "", "worker": "", "detokenizer": ""}


def test_the_notes_say_how_separate_groups_are_upgraded() -> None:
    notes = render_texts(VALUE_SETS["separate"])["pando/templates/NOTES.txt"]
    assert "component=scheduler\n" in notes
    for group in range(2):
        assert f"kubectl -n llm delete pod -l app.kubernetes.io/instance=demo,pando/group={group}\n" in notes
    together = render_texts({})["pando/templates/NOTES.txt"]
    assert "component=group\n" in together
    assert "delete pod" not in together


def test_clients_reach_all_endpoints_through_ingress_and_route() -> None:
    ingress = named(render(VALUE_SETS["ingress"]), "Ingress", "gateway")["spec"]["rules"][0]["http"]["paths"]
    assert [(path["path"], path["pathType"]) for path in ingress] == [("/", "Prefix")]
    route = named(render(VALUE_SETS["http-route"]), "HTTPRoute", "gateway")["spec"]["rules"][0]["matches"]
    assert route == [{"path": {"type": "PathPrefix", "value": "/"}}]
    limited = {"ingress": {"enabled": True, "hosts": ["llm.example"], "paths": ["/v1", "/v2"]}}
    paths = named(render(limited), "Ingress", "gateway")["spec"]["rules"][0]["http"]["paths"]
    assert [path["path"] for path in paths] == ["/v1", "/v2"]


def test_settings_cannot_move_an_address_away_from_its_service() -> None:
    objects = render({"settings": {"scheduler": {"address": "127.0.0.1:1", "max_rows": 7}}})
    scheduler = Settings(**settings_of(objects, "scheduler")).scheduler
    assert (scheduler.address, scheduler.max_rows) == ("0.0.0.0:50052", 7)


@every_value_set
def test_commands_name_modules_that_there_are(name: str) -> None:
    for module in _modules(render(VALUE_SETS[name])):
        assert importlib.util.find_spec(module) is not None


def _modules(objects: list[Manifest]) -> Iterator[str]:
    for each in running(objects):
        command = each.container["command"]
        assert command[:2] == ["python", "-m"]
        yield command[2]


def test_every_component_of_the_pipeline_is_rendered_once() -> None:
    kinds = [component_of(item) for item in render({}) if item["kind"] in ("Deployment", "StatefulSet")]
    assert sorted(kinds) == ["detokenizer", "gateway", "group", "tokenizer"]
    separate = render({"groups": {"layout": "separate"}})
    kinds = [component_of(item) for item in separate if item["kind"] in ("Deployment", "StatefulSet")]
    assert sorted(kinds) == sorted(("gateway", *SERVICES))


@pytest.mark.parametrize("name", ["limits", "limits-of-groups"])
def test_gateways_and_schedulers_read_the_limits_from_a_folder_that_follows_the_values(
    name: str, tmp_path: Path
) -> None:
    objects = render(VALUE_SETS[name])
    [limits] = [each for each in objects if each["kind"] == "ConfigMap" and "limits.toml" in each["data"]]
    path = tmp_path / "limits.toml"
    path.write_text(limits["data"]["limits.toml"])
    assert load_limits(path).of("acme").weight == 2
    readers = 0
    for each in running(objects):
        mounts = {mount["name"]: mount for mount in each.container["volumeMounts"]}
        assert ("limits" in mounts) == (each.service in ("gateway", "scheduler"))
        if "limits" in mounts:
            readers += 1
            assert "subPath" not in mounts["limits"]
            assert str(each.settings.limits.file) == f"{mounts['limits']['mountPath']}/limits.toml"
            volumes = {volume["name"]: volume for volume in each.template["spec"]["volumes"]}
            assert volumes["limits"]["configMap"]["name"] == limits["metadata"]["name"]
    assert readers == 2
    assert not any("limits" in settings_of(render({}), service) for service in ("gateway", "scheduler"))
