"""Who can talk to whom: exactly the pipeline's arrows, worked out from the policies as a network plugin would."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.helm.chart import (
    Manifest,
    component_of,
    group_of,
    render,
    role_of,
    running,
    selected,
    templates_of,
)
from tests.deploy.helm.value_sets import VALUE_SETS

# From where to where, at which port; None: all ports.
Edge = tuple[str, str, int | None]
ENFORCED = [name for name, values in VALUE_SETS.items() if values.get("networkPolicy", {}).get("enabled", True)]


@pytest.mark.parametrize("name", ENFORCED)
def test_open_edges_are_those_of_the_pipeline(name: str) -> None:
    objects = render(VALUE_SETS[name])
    assert open_edges(objects) == pipeline_of(objects)


@pytest.mark.parametrize("name", ENFORCED)
def test_every_pod_has_a_policy_for_both_directions(name: str) -> None:
    objects = render(VALUE_SETS[name])
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
    assert all(spec["policyTypes"] == ["Ingress", "Egress"] for spec in policies)
    for labels in labels_of(objects).values():
        assert sum(_selects(spec["podSelector"], labels) for spec in policies) == 1


@pytest.mark.parametrize("name", ["roles", "roles-over-nodes"])
def test_only_schedulers_and_workers_of_groups_with_roles_reach_each_other(name: str) -> None:
    objects = render(VALUE_SETS[name])
    between = {
        (source, target, port)
        for source, target, port in open_edges(objects)
        if {source.split("-")[2], target.split("-")[2]} == {"prefill", "decode"}
    }
    # In one pod, a scheduler may do what its worker may.
    schedulers, workers = {50052}, set(range(50053, 50057 if name == "roles-over-nodes" else 50055))
    assert between
    assert {port for _, _, port in between} == schedulers | workers
    assert {(target.split("-")[2], port) for _, target, port in between if target.endswith("-group")} >= {
        ("prefill", 50052), ("prefill", 50054), ("decode", 50052), ("decode", 50053),
    }  # fmt: skip
    assert not [port for _, target, port in between if target.endswith("-worker") and port not in workers]


def test_a_superfluous_network_edge_would_be_noticed() -> None:
    objects = render({"groups": {"layout": "separate"}})
    for item in objects:
        if item["kind"] == "NetworkPolicy" and component_of(item) == "worker":
            item["spec"]["ingress"].append({"from": [{"podSelector": {}}], "ports": [{"port": 50053}]})
        if item["kind"] == "NetworkPolicy" and component_of(item) == "gateway":
            item["spec"]["egress"].append({"to": [{"podSelector": {}}], "ports": [{"port": 50053}]})
    assert ("demo-pando-gateway", "demo-pando-worker", 50053) in open_edges(objects)


def test_only_the_gateway_is_open_to_all_and_only_without_named_clients() -> None:
    assert [name for name, rules in _ingress(render({})).items() if any("from" not in rule for rule in rules)] == [
        "gateway"
    ]
    named = _ingress(render(VALUE_SETS["keys-and-admin"]))
    assert all("from" in rule for rules in named.values() for rule in rules)


@pytest.mark.parametrize("name", ENFORCED)
def test_metrics_are_read_only_by_prometheus_in_its_own_namespace(name: str) -> None:
    objects = render(VALUE_SETS[name])
    prometheus = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    ingress = _ingress(objects)
    for each in running(objects):
        section = getattr(each.settings, each.section)
        port = section.metrics_port
        assert each.settings.metrics.host in ("0.0.0.0", "::")
        assert [rule["from"] for rule in ingress[component_of(each.workload)] if port in _ports(rule)] == [[prometheus]]


def test_only_services_that_read_a_fetched_model_may_reach_outside_addresses() -> None:
    def who_leaves(values: dict[str, Any]) -> set[str]:
        return {
            component_of(item)
            for item in render(values)
            if item["kind"] == "NetworkPolicy"
            for rule in item["spec"]["egress"]
            if any("ipBlock" in peer for peer in rule.get("to", [])) and 53 not in _ports(rule)
        }

    assert who_leaves({}) == set()
    for source in ("model-from-s3", "model-from-gs"):
        assert who_leaves(VALUE_SETS[source]) == {"tokenizer", "detokenizer", "group"}
    assert who_leaves(VALUE_SETS["model-from-s3"] | {"groups": {"layout": "separate"}}) == {
        "tokenizer",
        "detokenizer",
        "worker",
    }


def test_names_are_resolved_by_pods_node_local_caches_and_clouds() -> None:
    policies = [item["spec"] for item in render({}) if item["kind"] == "NetworkPolicy"]
    assert policies
    for spec in policies:
        [names] = [rule for rule in spec["egress"] if rule.get("ports", [{}])[0].get("port") == 53]
        assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"]
        assert {"ipBlock": {"cidr": "169.254.169.254/32"}} in names["to"]


def test_only_gateways_fetch_the_keys_of_signed_tokens() -> None:
    peers = VALUE_SETS["signed-tokens"]["networkPolicy"]["jwksTo"]
    leaving = {
        component_of(item): rule
        for item in render(VALUE_SETS["signed-tokens"])
        if item["kind"] == "NetworkPolicy"
        for rule in item["spec"]["egress"]
        if _ports(rule) == [443]
    }
    assert leaving == {"gateway": {"ports": [{"port": 443, "protocol": "TCP"}], "to": peers}}
    # A file needs no connection.
    file = {"settings": {"gateway": {"jwt": {"keys": "/keys.json", "issuer": "i", "audience": "a"}}}}
    gateway = next(item for item in render(file) if item["kind"] == "NetworkPolicy" and component_of(item) == "gateway")
    assert not [rule for rule in gateway["spec"]["egress"] if _ports(rule) == [443]]

    def ports(url: str) -> list[int | None]:
        values = {"settings": {"gateway": {"jwt": {"keys": url, "issuer": "i", "audience": "a"}}}}
        policies = {component_of(item): item for item in render(values) if item["kind"] == "NetworkPolicy"}
        own = {port for rule in policies["gateway"]["spec"]["egress"] for port in _ports(rule)}
        return sorted(own - {port for rule in gateway["spec"]["egress"] for port in _ports(rule)}, key=str)

    assert ports("https://id.example:8443/keys:1") == [8443]
    assert ports("https://id.example/keys:1") == [443]


def test_only_gateways_reach_their_state() -> None:
    def rules(name: str) -> dict[str, list[Manifest]]:
        found = [item for item in render(VALUE_SETS[name]) if item["kind"] == "NetworkPolicy"]
        by_owner = {
            component_of(item): [rule for rule in item["spec"]["egress"] if rule["ports"][0]["port"] in (6379, 6380)]
            for item in found
            if all("ports" in rule for rule in item["spec"]["egress"])
        }
        return {owner: rules for owner, rules in by_owner.items() if rules}

    peers = VALUE_SETS["several-gateways"]["networkPolicy"]["stateTo"]
    assert rules("several-gateways") == {"gateway": [{"ports": [{"port": 6380}], "to": peers}]}
    assert rules("hpa") == {"gateway": [{"ports": [{"port": 6379}]}]}
    assert rules("defaults") == {}


def test_the_gateway_of_another_release_reaches_all_services_but_the_workers() -> None:
    rules = _ingress(render(VALUE_SETS["model-for-another-gateway"]))
    front = VALUE_SETS["model-for-another-gateway"]["networkPolicy"]["otherGateways"]
    open_to_it = {name: rule["ports"] for name, found in rules.items() for rule in found if rule.get("from") == front}
    assert open_to_it == {
        "tokenizer": [{"port": 50051}],
        "detokenizer": [{"port": 50054}],
        "group": [{"port": 50052}],
    }


def test_a_gateway_of_two_releases_reaches_its_peers_in_both() -> None:
    releases = {name: render(VALUE_SETS[f"example-two-models-{name}"], name) for name in ("front", "large")}
    served = {
        release: next(each.settings for each in running(objects) if each.service == "tokenizer").model.name
        for release, objects in releases.items()
    }
    gateway = next(each for each in running(releases["front"]) if each.service == "gateway")
    models = gateway.settings.gateway.models
    assert models.keys() == set(served.values())
    assert gateway.settings.gateway.default_model in models
    both = [*releases["front"], *releases["large"]]
    asked = {
        (gateway.workload["metadata"]["name"], target, port)
        for model in models.values()
        for address in (*model.tokenizer, *model.detokenizer, *model.schedulers)
        for target, port in targets_of(both, address)
    }
    within = pipeline_of(releases["front"]) | pipeline_of(releases["large"])
    assert open_edges(both) == within | asked


def pipeline_of(objects: list[Manifest]) -> set[Edge]:
    """Return the connections that the services of a release open between pods, as their settings say."""
    edges: set[Edge] = set()
    encoders = {
        group_of(each): each.settings.scheduler.encoders for each in running(objects) if each.service == "scheduler"
    }
    # The workloads whose pods are groups that share experts.
    sharing = {
        each.workload["metadata"]["name"]
        for each in running(objects)
        if each.service == "scheduler" and each.settings.scheduler.data_parallel.size > 1
    }
    for each in running(objects):
        settings, source = each.settings, name_of(each.workload, each.template)
        addresses = {
            "gateway": [*settings.gateway.tokenizer, *settings.gateway.detokenizer, *settings.gateway.schedulers],
            "tokenizer": settings.tokenizer.schedulers,
            "scheduler": [
                *settings.scheduler.detokenizer,
                *settings.scheduler.workers,
                *settings.scheduler.encoders,
            ],
            # Workers read embeddings where their scheduler has them computed.
            "worker": () if each.workload["kind"] == "LeaderWorkerSet" else encoders.get(group_of(each), ()),
        }
        for address in addresses.get(each.service, []):
            # Policies do not concern connections within a pod.
            edges |= {(source, target, port) for target, port in targets_of(objects, address) if target != source}
        if each.service == "worker":
            # Ranks exchange tensors at ports that NCCL and gloo choose.
            has_other_pods = (
                component_of(each.workload) == "worker"
                or each.workload["kind"] == "LeaderWorkerSet"
                or each.workload["metadata"]["name"] in sharing
            )
            names = [name_of(each.workload, template) for template in templates_of(each.workload)]
            edges |= {(source, name, None) for name in names if has_other_pods}
    edges |= transfers_between(objects)
    # `helm test` is a client.
    hook = next(item["metadata"]["name"] for item in objects if item["kind"] == "Pod")
    gateway = next(each for each in running(objects) if each.service == "gateway")
    return edges | {(hook, gateway.workload["metadata"]["name"], gateway.settings.gateway.port)}


def transfers_between(objects: list[Manifest]) -> set[Edge]:
    """Return the connections by which groups with roles have prompts computed by each other, and read their pages."""
    edges: set[Edge] = set()
    members = [each for each in running(objects) if role_of(each.workload)]
    for service in ("scheduler", "worker"):
        found = [each for each in members if each.service == service]
        ports = {
            name_of(each.workload, each.template): [
                port["containerPort"] for port in each.container["ports"] if "metrics" not in port["name"]
            ]
            for each in found
        }
        edges |= {(source, target, port) for source in ports for target, own in ports.items() for port in own}
    return edges


def targets_of(objects: list[Manifest], address: str) -> set[tuple[str, int]]:
    """Return the pods that an address stands for: of a Service, or of one as <pod>.<service>.<namespace>.svc."""
    host, _, port = address.removeprefix("dns:").rpartition(":")
    if "." not in host:
        return {(name, int(port)) for name in selected(objects, host)}
    pod, service = host.split(".")[:2]
    is_later_pod = (
        any(item["kind"] == "LeaderWorkerSet" for item in objects) and pod.count("-") > service.count("-") + 1
    )
    return {(service.replace("-group", "-worker") if is_later_pod else service, int(port))}


def name_of(workload: Manifest, template: Manifest) -> str:
    """Return the name of a workload's pods; the later pods of a group are named after their component."""
    name: str = workload["metadata"]["name"]
    own, of_pods = component_of(workload), component_of(template)
    return name if own == of_pods else name.removesuffix(own) + of_pods


def labels_of(objects: list[Manifest]) -> dict[str, dict[str, str]]:
    """Return the labels of the pods of each workload, and of the test."""
    labels = {
        name_of(item, template): template["metadata"]["labels"] for item in objects for template in templates_of(item)
    }
    return labels | {item["metadata"]["name"]: item["metadata"]["labels"] for item in objects if item["kind"] == "Pod"}


def open_edges(objects: list[Manifest]) -> set[Edge]:
    """Return the connections between pods of the release that both the sender's and the receiver's policies allow.

    That everybody may reach the gateway is left out: what counts is who inside needs to.
    """
    labels = labels_of(objects)
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]

    def allowed(owner: str, direction: str, peers: str) -> set[tuple[str, int | None]]:
        found: set[tuple[str, int | None]] = set()
        for spec in policies:
            if not _selects(spec["podSelector"], labels[owner]):
                continue
            for rule in spec[direction]:
                names = [
                    name
                    for name, pod in labels.items()
                    if any("podSelector" in peer and _matches(peer, pod) for peer in rule.get(peers, []))
                ]
                found |= {(name, port) for name in names for port in _ports(rule)}
        return found

    return {
        (source, target, port)
        for source in labels
        for target, port in allowed(source, "egress", "to")
        if port != 53 and _admits(allowed(target, "ingress", "from"), source, port)
    }


def _admits(open_ports: set[tuple[str, int | None]], source: str, port: int | None) -> bool:
    return (source, port) in open_ports or (source, None) in open_ports


def _ports(rule: Manifest) -> list[int | None]:
    ports = rule.get("ports")
    if ports is None:
        return [None]
    return [number for port in ports for number in range(port["port"], port.get("endPort", port["port"]) + 1)]


def _matches(peer: Manifest, pod: Manifest) -> bool:
    return _selects(peer["podSelector"], pod)


def _selects(selector: Manifest, pod: Manifest) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= pod.items()


def _ingress(objects: list[Manifest]) -> dict[str, list[Manifest]]:
    return {component_of(item): item["spec"]["ingress"] for item in objects if item["kind"] == "NetworkPolicy"}


def test_every_service_may_send_its_spans_to_the_collector_only() -> None:
    peers = VALUE_SETS["traced"]["networkPolicy"]["tracingTo"]
    policies = [item for item in render(VALUE_SETS["traced"]) if item["kind"] == "NetworkPolicy"]
    sending = {
        component_of(item): rule
        for item in policies
        for rule in item["spec"].get("egress", ())
        if {"port": 4317, "protocol": "TCP"} in rule.get("ports", ())
    }
    assert {"gateway", "tokenizer", "group", "detokenizer"} <= sending.keys()
    assert all(rule["to"] == peers for rule in sending.values())


def test_every_service_reads_where_its_spans_go() -> None:
    files = [
        text
        for item in render(VALUE_SETS["traced"])
        if item["kind"] in ("ConfigMap", "Secret")
        for text in (item.get("data") or item.get("stringData") or {}).values()
        if "[rpc]" in text
    ]
    assert len(files) >= 5
    assert all("collector.observability:4317" in text for text in files)
