"""What the pods run fits the services: settings, health names, ports, and time to end."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import Settings
from tests.deploy.helm.chart import Manifest, component_of, container, named, pods, render, settings_of
from tests.deploy.helm.value_sets import VALUE_SETS

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = ("tokenizer", "scheduler", "worker", "detokenizer")
every_value_set = pytest.mark.parametrize("name", VALUE_SETS)


@every_value_set
def test_the_services_accept_the_rendered_settings(name: str) -> None:
    objects = render(VALUE_SETS[name])
    settings = Settings(**settings_of(objects))
    for component, pod in pods(objects).items():
        ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        if component == "gateway":
            assert ports == {"http": settings.gateway.port}
            continue
        section = getattr(settings, component)
        assert ports["grpc"] == int(section.address.rpartition(":")[2])
        assert ports["metrics"] == section.metrics_port


@every_value_set
def test_every_address_is_that_of_a_service_of_the_release(name: str) -> None:
    objects = render(VALUE_SETS[name])
    settings = Settings(**settings_of(objects))
    ports = {
        item["metadata"]["name"]: [port["port"] for port in item["spec"]["ports"]]
        for item in objects
        if item["kind"] == "Service"
    }
    for address in (
        settings.gateway.tokenizer,
        settings.gateway.detokenizer,
        settings.tokenizer.scheduler,
        settings.scheduler.detokenizer,
    ):
        host, _, port = address.partition(":")
        assert int(port) in ports[host]


@every_value_set
def test_the_scheduler_knows_every_rank_in_order(name: str) -> None:
    objects = render(VALUE_SETS[name])
    workers = Settings(**settings_of(objects)).scheduler.workers
    group = next(item for item in objects if item["kind"] in ("StatefulSet", "LeaderWorkerSet"))
    set_name, spec = group["metadata"]["name"], group["spec"]
    ranks = [port for port in container(pods(objects)["worker"])["ports"] if port["name"].startswith("grpc")]
    if group["kind"] == "StatefulSet":
        assert spec["serviceName"] == set_name
        hosts = [f"{set_name}-{pod}" for pod in range(spec["replicas"])]
    else:
        hosts = [f"{set_name}-0", *(f"{set_name}-0-{pod}" for pod in range(1, spec["leaderWorkerTemplate"]["size"]))]
    assert list(workers) == [f"{host}.{set_name}.llm.svc:{rank['containerPort']}" for host in hosts for rank in ranks]


def test_probes_ask_for_the_health_names_that_the_services_have() -> None:
    for component, template in pods(render({})).items():
        probes = container(template)
        if component == "gateway":
            assert probes["livenessProbe"]["httpGet"]["path"] == "/health"
            assert probes["readinessProbe"]["httpGet"]["path"] == "/ready"
            continue
        # As the service registers itself, in its own source.
        health_name = importlib.import_module(f"services.{component}.__main__").NAME
        assert probes["readinessProbe"]["grpc"]["service"] == health_name
        assert probes["livenessProbe"]["grpc"]["service"] == ""
        assert probes["startupProbe"]["grpc"]["service"] in ("", health_name)


def test_the_gateways_probes_are_its_routes() -> None:
    from gateway.api import operations

    routes = {getattr(route, "path", "") for route in operations.create_router(None).routes}  # type: ignore[arg-type]  # only names are asked for
    probes = container(pods(render({}))["gateway"])
    asked = {probes[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert asked <= routes


def test_the_start_may_take_as_long_as_the_weights_need() -> None:
    probe = container(pods(render({"model": {"loadSeconds": 3601}}))["scheduler"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3601


@every_value_set
def test_pods_get_longer_to_end_than_they_need(name: str) -> None:
    objects = render(VALUE_SETS[name])
    settings = Settings(**settings_of(objects))
    for component, template in pods(objects).items():
        sleep = container(template)["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = getattr(getattr(settings, component), "drain_s", 0)
        assert template["spec"]["terminationGracePeriodSeconds"] > sleep + drain


@every_value_set
def test_models_are_where_the_settings_say(name: str) -> None:
    objects = render(VALUE_SETS[name])
    reference = Settings(**settings_of(objects)).model.reference
    for component in ("tokenizer", "detokenizer", "worker"):
        spec = pods(objects)[component]["spec"]
        mounts = [mount["mountPath"] for mount in container({"spec": spec})["volumeMounts"]]
        assert ("/models" in mounts) == reference.startswith("/models/")
        for fetching in spec.get("initContainers", []):
            assert reference in fetching["args"]


def test_secrets_are_never_in_the_settings_file() -> None:
    objects = render(VALUE_SETS["keys-and-admin"])
    assert settings_of(objects)["gateway"]["keys_file"] == "/etc/pando/keys/keys.toml"
    text = named(objects, "ConfigMap", "settings")["data"]["pando.toml"]
    assert not re.search("^ *(admin_token|token|secret) *=", text, re.MULTILINE)
    [mount] = [m for m in container(pods(objects)["scheduler"])["volumeMounts"] if m["name"] == "admin"]
    assert settings_of(objects)["scheduler"]["admin_token_file"] == f"{mount['mountPath']}/token"


def test_services_trust_each_other_by_certificates_and_probes_need_none() -> None:
    objects = render(VALUE_SETS["own-authority"])
    rpc = Settings(**settings_of(objects)).rpc
    assert (rpc.plaintext, rpc.probe_port) == (False, 9200)
    for component, template in pods(objects).items():
        [mount] = [m for m in container(template)["volumeMounts"] if m["name"] == "tls"]
        assert str(rpc.certificate) == f"{mount['mountPath']}/tls.crt"
        [volume] = [v for v in template["spec"]["volumes"] if v["name"] == "tls"]
        certificate = named(objects, "Certificate", component)["spec"]
        assert certificate["secretName"] == volume["secret"]["secretName"]
        if component != "gateway":
            assert container(template)["livenessProbe"]["grpc"]["port"] == rpc.probe_port


def test_every_address_of_the_ring_is_in_its_peers_certificate() -> None:
    objects = render(VALUE_SETS["own-authority"])
    settings = Settings(**settings_of(objects))
    names = {c: named(objects, "Certificate", c)["spec"]["dnsNames"] for c in ("gateway", *SERVICES)}
    assert settings.gateway.tokenizer.partition(":")[0] in names["tokenizer"]
    assert settings.gateway.detokenizer.partition(":")[0] in names["detokenizer"]
    assert settings.tokenizer.scheduler.partition(":")[0] in names["scheduler"]
    for address in settings.scheduler.workers:
        pod, _, rest = address.rpartition(":")[0].partition(".")
        assert pod
        assert f"*.{rest}" in names["worker"]


def test_plaintext_is_asked_for_where_there_is_no_tls() -> None:
    assert Settings(**settings_of(render({}))).rpc.plaintext


def test_a_setting_changes_and_the_pods_are_replaced() -> None:
    def checksum(values: dict[str, Any]) -> str:
        text: str = pods(render(values))["scheduler"]["metadata"]["annotations"]["checksum/settings"]
        return text

    assert checksum({}) != checksum({"settings": {"scheduler": {"max_rows": 7}}})


def test_settings_cannot_move_an_address_away_from_its_service() -> None:
    objects = render({"settings": {"scheduler": {"address": "127.0.0.1:1", "max_rows": 7}}})
    scheduler = Settings(**settings_of(objects)).scheduler
    assert (scheduler.address, scheduler.max_rows) == ("0.0.0.0:50052", 7)


@every_value_set
def test_commands_name_modules_that_there_are(name: str) -> None:
    for module in _modules(render(VALUE_SETS[name])):
        assert importlib.util.find_spec(module) is not None


def _modules(objects: list[Manifest]) -> Iterator[str]:
    for template in pods(objects).values():
        command = container(template)["command"]
        assert command[:2] == ["python", "-m"]
        yield command[2]


def test_every_component_of_the_ring_is_there_once() -> None:
    kinds = [component_of(item) for item in render({}) if item["kind"] in ("Deployment", "StatefulSet")]
    assert sorted(kinds) == sorted(("gateway", *SERVICES))
