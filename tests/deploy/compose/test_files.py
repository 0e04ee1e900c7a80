"""The compose files by themselves: order of the start, who is reachable, what containers may do."""

from __future__ import annotations

import argparse
import re
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from dotenv import dotenv_values

from common.settings import SchedulerSettings, Settings, check_environment, parse_settings
from common.settings.scheduler import DataParallelSettings, HostTierSettings
from deploy.supervisor.command import read_roles
from deploy.supervisor.layout import PlannedGroup, Replicas, plan_layout
from tests.deploy.helm.chart import CHART

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
NAMES = ("worker", "detokenizer", "scheduler", "tokenizer", "gateway")


class Loader(yaml.SafeLoader):
    """Reads the tags that are Compose's own."""


def _whole(loader: yaml.SafeLoader, node: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True)


yaml.add_constructor("!reset", lambda *_: None, Loader)
yaml.add_constructor("!override", _whole, Loader)


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.load((COMPOSE / name).read_text(), Loader)
    return content


def settings_with(environment: dict[str, Any], variables: dict[str, str], patch: pytest.MonkeyPatch) -> Settings:
    """Read what a service's environment says once Compose has put `variables` into it."""

    def fill(match: re.Match[str]) -> str:
        return variables.get(match[1]) or (match[3] if match[2] == "-" else "")

    with patch.context() as context:
        for name, value in environment.items():
            if value is None:
                if name in variables:
                    context.setenv(name, variables[name])
                continue
            context.setenv(name, re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", fill, str(value)))
        return parse_settings(argparse.ArgumentParser(), [])[0]


SERVICES = load("compose.yaml")["services"]
every_service = pytest.mark.parametrize("name", NAMES)


def test_the_plain_command_at_the_root_finds_the_file() -> None:
    variables = dotenv_values(ROOT / ".env")
    assert (ROOT / str(variables["COMPOSE_FILE"])).samefile(COMPOSE / "compose.yaml")


@every_service
def test_a_service_starts_after_the_services_that_it_needs_are_healthy(name: str) -> None:
    needed = {
        "worker": {"model"},
        "detokenizer": {"model"},
        "scheduler": {"worker", "detokenizer"},
        "tokenizer": {"scheduler"},
        "gateway": {"tokenizer", "detokenizer"},
    }
    waits = SERVICES[name].get("depends_on", {})
    assert waits.keys() == needed[name]
    for other, condition in waits.items():
        ended = "service_completed_successfully" if other == "model" else "service_healthy"
        assert condition == {"condition": ended}
    assert SERVICES[name]["healthcheck"]["test"][-2:] == ["deploy.health", name]


@every_service
def test_containers_restart_within_limits_and_change_nothing_of_their_image(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "memory" in service["deploy"]["resources"]["limits"]


def test_only_the_gateway_is_reachable_from_outside() -> None:
    assert load("compose.yaml")["networks"]["pipeline"] == {"internal": True}
    for name in NAMES:
        assert ("ports" in SERVICES[name]) == (name == "gateway")
        assert ("edge" in SERVICES[name]["networks"]) == (name == "gateway")
    published = SERVICES["gateway"]["ports"] + SERVICES["prometheus"]["ports"] + SERVICES["grafana"]["ports"]
    assert all("127.0.0.1" in port for port in published)


def test_one_container_downloads_the_model_into_the_volume_that_all_read() -> None:
    model = SERVICES["model"]
    program, name = model["command"][:-1], model["command"][-1]
    assert program == ["python", "-m", "common.models.pull"]
    assert name == SERVICES["worker"]["environment"]["PANDO_MODEL__REFERENCE"]
    assert model["networks"] == ["edge"]
    assert "HF_HUB_OFFLINE" not in model["environment"]
    [volume] = model["volumes"]
    assert volume == f"models:{model['environment']['HF_HOME']}"
    for service in NAMES:
        environment = SERVICES[service]["environment"]
        assert (environment["HF_HOME"], environment["HF_HUB_OFFLINE"]) == (model["environment"]["HF_HOME"], "1")
        assert "HF_TOKEN" not in environment
        assert f"{volume}:ro" in SERVICES[service]["volumes"]


def test_settings_in_the_environment_exist_and_fit() -> None:
    environment = {
        key: str(value) for key, value in SERVICES["gateway"]["environment"].items() if key.startswith("PANDO_")
    }
    check_environment(environment)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in environment.items():
        section, field = key.removeprefix("PANDO_").lower().split("__")
        default = re.fullmatch(r"\$\{\w+:-(.*)\}", value)
        plain = {"PANDO_MODEL__REFERENCE": "model"}.get(key, default[1] if default else value)
        sections.setdefault(section, {})[field] = yaml.safe_load(plain) if plain.startswith("[") else plain
    settings = Settings.model_validate(sections)
    assert settings.rpc.plaintext
    assert settings.scheduler.workers == ("worker:50053",)


@every_service
def test_addresses_are_those_of_containers(name: str) -> None:
    environment = SERVICES[name]["environment"]
    for key in (
        "GATEWAY__TOKENIZER",
        "GATEWAY__DETOKENIZER",
        "GATEWAY__SCHEDULERS",
        "TOKENIZER__SCHEDULERS",
        "SCHEDULER__DETOKENIZER",
    ):
        host, port = environment[f"PANDO_{key}"].removeprefix("dns:").split(":")
        assert environment[f"PANDO_{host.upper()}__ADDRESS"] == f"0.0.0.0:{port}"


def test_containers_may_call_the_gateway_by_its_name() -> None:
    environment = SERVICES["gateway"]["environment"]
    assert "gateway" in yaml.safe_load(environment["PANDO_GATEWAY__ALLOWED_HOSTS"])


def test_prometheus_scrapes_every_service_where_it_reports() -> None:
    static, by_name = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {config["labels"]["pod"]: config["targets"] for config in static["static_configs"]}
    environment = SERVICES["worker"]["environment"]
    ports = {name: int(environment[f"PANDO_{name.upper()}__METRICS_PORT"]) for name in NAMES}
    # Of the gateway there may be replicas, which have one name.
    assert targets == {name: [f"{name}:{port}"] for name, port in ports.items() if name != "gateway"}
    assert environment["PANDO_METRICS__HOST"] == "0.0.0.0"
    found = {name: config["port"] for config in by_name["dns_sd_configs"] for name in config["names"]}
    started = {
        name: service["extends"]["service"]
        for overlay in (
            "batches.yaml",
            "data-parallel.yaml",
            "encoders.yaml",
            "gateways.yaml",
            "gpu-2.yaml",
            "limits.yaml",
            "models.yaml",
            "roles.yaml",
        )
        for name, service in load(overlay)["services"].items()
        if "extends" in service and service["extends"]["service"] != "model"
    }
    assert found == {"gateway": ports["gateway"]} | {name: ports[like] for name, like in started.items()}


def test_rules_and_dashboards_are_those_of_the_chart() -> None:
    mounts = [mount.split(":")[0] for name in ("prometheus", "grafana") for mount in SERVICES[name]["volumes"]]
    assert (COMPOSE / "../helm/pando/alerts").resolve() == CHART / "alerts"
    assert {"../helm/pando/alerts", "../helm/pando/dashboards"} <= set(mounts)
    for mount in mounts:
        if mount.startswith("."):
            assert (COMPOSE / mount).exists()
    assert all(SERVICES[name]["profiles"] == ["observability"] for name in ("prometheus", "grafana"))


def test_secrets_are_files_mounted_into_the_services_that_read_them() -> None:
    overlay = load("secrets.yaml")
    for service in overlay["services"].values():
        named = {path for path in service["environment"].values() if path.startswith("file:")}
        assert named == {f"file:/run/secrets/{name}" for name in service["secrets"]}
        assert set(service["secrets"]) <= overlay["secrets"].keys()
    # The scheduler flushes its cache only for who knows the token.
    assert "admin_token" in overlay["services"]["gateway"]["secrets"]


@pytest.mark.parametrize(
    ("overlay", "service", "setting"),
    [
        ("secrets.yaml", "gateway", "gateway.keys_file"),
        ("limits.yaml", "gateway", "limits.file"),
        ("limits.yaml", "scheduler", "limits.file"),
    ],
)
def test_files_that_are_replaced_are_mounted_with_their_directory(
    overlay: str, service: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A container does not see that a file is replaced that is mounted singly: a revoked key would stay valid.
    definition = load(overlay)["services"][service]
    [mount] = definition["volumes"]
    settings = settings_with(definition["environment"], {}, monkeypatch)
    file: Path = attrgetter(setting)(settings)
    assert str(file.parent) == mount["target"]
    assert (mount["type"], mount["read_only"], mount["bind"]) == ("bind", True, {"create_host_path": False})
    assert f"names the directory of {file.name}" in mount["source"]


def test_gateway_and_scheduler_read_the_same_limits() -> None:
    services = load("limits.yaml")["services"]
    assert services.keys() == {"gateway", "scheduler"}
    assert services["gateway"]["volumes"] == services["scheduler"]["volumes"]


def test_each_service_mounts_a_separate_certificate_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    services = load("tls.yaml")["services"]
    assert services.keys() == set(NAMES)
    for name, service in services.items():
        [mount] = service["volumes"]
        source, target, mode = mount.rsplit(":", 2)
        assert (source.rpartition("/")[2], mode) == (name, "ro")
        rpc = settings_with({**SERVICES[name]["environment"], **service["environment"]}, {}, monkeypatch).rpc
        assert (str(rpc.certificate), rpc.plaintext) == (f"{target}/tls.crt", False)


@every_service
def test_each_service_sends_its_traces_to_jaeger(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    services = load("tracing.yaml")["services"]
    settings = settings_with(services[name]["environment"], {}, monkeypatch)
    assert settings.tracing.sample_ratio == 1
    assert settings.tracing.endpoint is not None
    address = urlsplit(settings.tracing.endpoint)
    # Where Jaeger takes OTLP over gRPC, in a network that it shares with all of Pando's services.
    assert (address.scheme, address.port) == ("http", 4317)
    assert set(services[str(address.hostname)]["networks"]) & set(SERVICES[name]["networks"])


def test_models_that_share_a_device_agree_in_one_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = load("shared-device.yaml")
    assert overlay["services"].keys() == {"worker", "scheduler", "second-worker", "second-scheduler"}
    assert overlay["services"].keys() <= load("models.yaml")["services"].keys()
    for service in overlay["services"].values():
        turns = settings_with(service["environment"], {}, monkeypatch).scheduler.device_turns
        assert turns.enabled
        assert service["volumes"] == [f"turns:{turns.directory}"]
    assert overlay["volumes"]["turns"]["driver_opts"]["type"] == "tmpfs"


def test_two_models_have_separate_services_and_share_one_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = load("models.yaml")["services"]
    variables = {"PANDO_SECOND_MODEL": "/models/large", "PANDO_SECOND_NAME": "big"}

    def settings_of(name: str) -> Settings:
        base = SERVICES[overlay[name].get("extends", {}).get("service", name)]
        return settings_with({**base["environment"], **overlay[name]["environment"]}, variables, monkeypatch)

    models = settings_of("gateway").gateway.models
    assert list(models) == ["smollm2-135m-instruct", "big"]
    for prefix, (name, backend) in zip(("", "second-"), models.items(), strict=True):
        pipeline = {part: settings_of(f"{prefix}{part}") for part in NAMES[:-1]}
        assert {settings.model.name for settings in pipeline.values()} == {name}
        assert backend.tokenizer == (f"dns:{prefix}tokenizer:50051",)
        detokenizers = (f"dns:{prefix}detokenizer:50054",)
        assert backend.detokenizer == pipeline["scheduler"].scheduler.detokenizer == detokenizers
        assert backend.schedulers == pipeline["tokenizer"].tokenizer.schedulers == (f"{prefix}scheduler:50052",)
        assert pipeline["scheduler"].scheduler.workers == (f"{prefix}worker:50053",)
        assert str(pipeline["scheduler"].scheduler.rendezvous).startswith(f"{prefix}worker:")
    assert overlay["second-model"]["command"][-1] == "${PANDO_SECOND_MODEL}"
    for name, service in overlay.items():
        if "extends" in service:
            waits = SERVICES[service["extends"]["service"]].get("depends_on", {})
            assert service.get("depends_on", {}).keys() == {f"second-{needed}" for needed in waits}, name


def test_groups_with_roles_are_configured_as_by_pando_up(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = load("roles.yaml")["services"]

    def settings_of(name: str, variables: dict[str, str] | None = None) -> Settings:
        base = SERVICES[overlay[name].get("extends", {}).get("service", name)]
        environment = {**base["environment"], **overlay[name].get("environment", {})}
        return settings_with(environment, variables or {}, monkeypatch)

    settings = Settings(scheduler=SchedulerSettings(host_tier=HostTierSettings(gigabytes=1)))
    layout = plan_layout(settings, Path("/run"), 1, Replicas(groups=read_roles("decode=1,prefill=1")))
    names = ["scheduler", "prefill-scheduler"]
    for index, name in enumerate(names):
        own, planned = settings_of(name).scheduler, layout.find(f"scheduler-{index}").settings.scheduler
        assert (own.role, own.host_tier, own.prefill_min_tokens) == (
            planned.role, planned.host_tier, planned.prefill_min_tokens,
        )  # fmt: skip
        assert own.prefill_min_tokens is None, "it is measured"
        variables = {"PANDO_SCHEDULER__PREFILL_MIN_TOKENS": "640"}
        assert settings_of(name, variables).scheduler.prefill_min_tokens == 640
        worker = f"{name.removesuffix('scheduler')}worker"
        assert own.workers == (f"{worker}:50053",)
        assert own.rendezvous.startswith(f"{worker}:")
        assert own.address == "0.0.0.0:50052"
    found = tuple(f"{name}:50052" for name in names)
    assert settings_of("tokenizer").tokenizer.schedulers == settings_of("gateway").gateway.schedulers == found
    # Prompts are computed where they are answered while the other group is away.
    assert "depends_on" not in overlay["tokenizer"]
    waits = {name: set(overlay[name]["depends_on"]) for name in overlay if "extends" in overlay[name]}
    assert waits == {"prefill-worker": {"model"}, "prefill-scheduler": {"prefill-worker", "detokenizer"}}


def test_groups_that_share_experts_are_configured_as_by_pando_up(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = load("data-parallel.yaml")["services"]

    def settings_of(name: str) -> Settings:
        base = SERVICES[overlay[name].get("extends", {}).get("service", name)]
        return settings_with({**base["environment"], **overlay[name].get("environment", {})}, {}, monkeypatch)

    settings = Settings(scheduler=SchedulerSettings(data_parallel=DataParallelSettings(size=2)))
    layout = plan_layout(settings, Path("/run"), 1, Replicas(groups=(PlannedGroup(), PlannedGroup())))
    names = ["scheduler", "group-1-scheduler"]
    for index, name in enumerate(names):
        own, planned = settings_of(name).scheduler, layout.find(f"scheduler-{index}").settings.scheduler
        shared = own.data_parallel
        assert (shared.size, shared.rank) == (planned.data_parallel.size, planned.data_parallel.rank) == (2, index)
        # All meet at the worker of the first group, at another port than ranks of one group.
        assert shared.rendezvous == "worker:29556" != own.rendezvous
        worker = f"{name.removesuffix('scheduler')}worker"
        assert own.workers == (f"{worker}:50053",)
        assert own.address == "0.0.0.0:50052"
    found = tuple(f"{name}:50052" for name in names)
    assert settings_of("tokenizer").tokenizer.schedulers == settings_of("gateway").gateway.schedulers == found
    # Neither scheduler waits for the other one, which is healthy only with it.
    waits = {name: set(overlay[name]["depends_on"]) for name in overlay if "extends" in overlay[name]}
    assert waits == {"group-1-worker": {"model"}, "group-1-scheduler": {"group-1-worker", "detokenizer"}}
    assert "depends_on" not in overlay["scheduler"]


def test_an_encoder_is_configured_as_by_pando_up(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = load("encoders.yaml")["services"]
    base = SERVICES["scheduler"]["environment"]
    own = settings_with({**base, **overlay["scheduler"]["environment"]}, {}, monkeypatch).scheduler
    planned = plan_layout(Settings(), Path("/run"), 1, Replicas(encoders=1)).find("scheduler").settings.scheduler
    assert (own.encoders, len(planned.encoders)) == (("encoder:50053",), 1)
    assert own.workers == ("worker:50053",)
    # Images are encoded where they are computed while it is away.
    assert overlay["encoder"]["extends"]["service"] == "worker"
    assert set(overlay["encoder"]["depends_on"]) == {"model"}
    assert "depends_on" not in overlay["scheduler"]


def test_two_gateways_share_a_state_server_on_the_internal_network(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = load("gateways.yaml")
    # Nothing but the server beside the gateway: a second service would not have what other overlays give the gateway.
    assert overlay["services"].keys() == {"valkey", "gateway"}
    gateway, server = overlay["services"]["gateway"], overlay["services"]["valkey"]
    environment = {**SERVICES["gateway"]["environment"], **gateway["environment"]}
    settings = settings_with(environment, {}, monkeypatch).gateway
    assert settings.state.url is not None
    assert settings.state.url.get_secret_value() == "redis://valkey:6379"
    assert settings.state.secret is not None
    assert settings.state.secret.get_secret_value() == "file:/run/secrets/state_secret"
    assert gateway["secrets"] == list(overlay["secrets"]) == ["state_secret"]
    assert gateway["depends_on"] == {"valkey": {"condition": "service_healthy"}}
    [published] = gateway["ports"]
    first, last = re.findall(r"8\d{3}", published.removesuffix(":8000"))
    assert int(last) - int(first) + 1 == gateway["deploy"]["replicas"]
    assert "127.0.0.1" in published
    assert server["networks"] == ["pipeline"]
    assert "ports" not in server
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    # Its entry point as root could not read what it has written as its own user, without rights that are dropped.
    assert server["user"] == "valkey"
    assert "cap_add" not in server
    # What is full must refuse: a limit that is evicted begins again.
    assert server["command"][-2:] == ["--maxmemory-policy", "noeviction"]


def test_gpus_are_asked_for_only_in_overlays_and_each_rank_has_its_worker() -> None:
    assert "reservations" not in (COMPOSE / "compose.yaml").read_text()
    two = load("gpu-2.yaml")["services"]
    workers = yaml.safe_load(two["scheduler"]["environment"]["PANDO_SCHEDULER__WORKERS"])
    assert workers == ["worker:50053", "worker-1:50053"]
    assert two["worker-1"]["environment"]["PANDO_WORKER__DEVICE_INDEX"] == "1"
    for overlay in (
        "data-parallel.yaml",
        "encoders.yaml",
        "gateways.yaml",
        "gpu.yaml",
        "gpu-2.yaml",
        "limits.yaml",
        "models.yaml",
        "roles.yaml",
        "secrets.yaml",
        "shared-device.yaml",
        "tls.yaml",
    ):
        services = load(overlay)["services"].values()
        assert any("environment" in service for service in services), overlay
        for service in services:
            check_environment({key: str(value) for key, value in service.get("environment", {}).items()})
