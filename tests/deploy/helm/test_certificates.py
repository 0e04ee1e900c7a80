"""Services identify each other by certificates, whose names are their roles and addresses."""

from __future__ import annotations

import pytest

from common.rpc.roles import Role
from common.settings import Settings
from tests.deploy.helm.chart import (
    SERVICES,
    Running,
    container,
    host_of,
    named,
    pods,
    render,
    running,
    settings_of,
)
from tests.deploy.helm.value_sets import ENCODERS, VALUE_SETS


def test_services_trust_each_other_by_certificates_and_probes_need_none() -> None:
    objects = render(VALUE_SETS["own-authority"])
    rpc = Settings(**settings_of(objects, "scheduler")).rpc
    assert (rpc.plaintext, rpc.probe_port) == (False, 9200)
    for component, template in pods(objects).items():
        if component != "gateway":
            assert container(template)["livenessProbe"]["grpc"]["port"] == rpc.probe_port


@pytest.mark.parametrize(
    "name", ["own-authority", "three-groups", "groups-keda", "given-issuer", "roles-over-nodes", *ENCODERS]
)
def test_each_service_has_a_separate_certificate_with_exactly_its_role(name: str) -> None:
    objects = render(VALUE_SETS[name])
    services = running(objects)
    assert {each.section for each in services} == {"gateway", *SERVICES}
    for each in services:
        certificate = named(objects, "Certificate", each.section)["spec"]
        assert certificate["secretName"] == certificate_secret(each)
        names = each.settings.rpc.names_of_roles()
        assert [role for role in names if set(names[role]) & set(certificate["uris"])] == [each.section]
    assert len({(each.section, certificate_secret(each)) for each in services}) == len(SERVICES) + 1


def test_a_worker_in_its_schedulers_pod_cannot_pass_for_the_scheduler() -> None:
    objects = render(VALUE_SETS["groups-keda"])
    scheduler, worker = (named(objects, "Certificate", name)["spec"]["dnsNames"] for name in ("scheduler", "worker"))
    assert scheduler == [
        f"demo-pando-{name}{suffix}" for name in ("group", "schedulers") for suffix in ("", ".llm.svc")
    ]
    assert worker == ["*.demo-pando-group.llm.svc"]


def test_operators_have_a_certificate_that_no_pod_mounts() -> None:
    objects = render(VALUE_SETS["own-authority"])
    operator = named(objects, "Certificate", "operator")["spec"]
    names = Settings(**settings_of(objects, "scheduler")).rpc.names_of_roles()
    assert tuple(operator["uris"]) == names[Role.OPERATOR] == ("spiffe://llm/pando/operator",)
    assert "server auth" not in operator["usages"]
    assert operator["secretName"] not in {certificate_secret(each) for each in running(objects)}


def test_given_certificates_are_mounted_by_their_services_and_may_name_roles_otherwise() -> None:
    objects = render(VALUE_SETS["given-certificates"])
    assert not [item for item in objects if item["kind"] in ("Certificate", "Issuer")]
    services = running(objects)
    assert {each.service: certificate_secret(each) for each in services} == {
        name: f"{name}-certificate" for name in ("gateway", *SERVICES)
    }
    names = services[0].settings.rpc.names_of_roles()
    assert names[Role.GATEWAY] == ("edge.example",)
    assert names[Role.SCHEDULER] == ("spiffe://llm.example/pando/scheduler",)


def certificate_secret(each: Running) -> str:
    """Return the Secret that is mounted where the service looks for its certificate."""
    directory = str(each.settings.rpc.certificate).rpartition("/")[0]
    [mount] = [mount for mount in each.container["volumeMounts"] if mount["mountPath"] == directory]
    [volume] = [volume for volume in each.template["spec"]["volumes"] if volume["name"] == mount["name"]]
    return str(volume["secret"]["secretName"])


@pytest.mark.parametrize(
    "name", ["own-authority", "three-groups", "groups-keda", "roles", "roles-over-nodes", *ENCODERS]
)
def test_every_pipeline_address_is_in_its_peer_s_certificate(name: str) -> None:
    objects = render(VALUE_SETS[name])
    secrets = {
        item["spec"]["secretName"]: item["spec"].get("dnsNames", [])
        for item in objects
        if item["kind"] == "Certificate"
    }
    shown: dict[str, list[str]] = {}
    for each in running(objects):
        shown[each.section] = secrets[certificate_secret(each)]
    for each in running(objects):
        settings = each.settings
        if each.service == "gateway":
            assert host_of(settings.gateway.tokenizer) in shown["tokenizer"]
            assert host_of(settings.gateway.detokenizer) in shown["detokenizer"]
        if each.service in ("gateway", "tokenizer"):
            assert host_of(getattr(settings, each.service).schedulers) in shown["scheduler"]
        if each.service == "scheduler":
            assert host_of(settings.scheduler.detokenizer) in shown["detokenizer"]
            for address in (*settings.scheduler.workers, *settings.scheduler.encoders):
                assert f"*.{address.rpartition(':')[0].partition('.')[2]}" in shown["worker"]


def test_plaintext_is_asked_for_where_there_is_no_tls() -> None:
    assert all(each.settings.rpc.plaintext for each in running(render({})))
