"""The examples for other projects: what Kubernetes and Pando say of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import yaml

from common.metric_names import NAMES
from common.settings import check_environment
from tests.deploy.compose.test_files import load, settings_with

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "integrations"
KUBERNETES = "1.32"
# The gateway's port in the pods, and their schedulers' port of metrics.
SERVING_PORT, METRICS_PORT = 8080, 9092


def objects(name: str) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in yaml.safe_load_all((FOLDER / name).read_text())}


def test_the_pods_of_the_kserve_runtime_are_valid_and_hold_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects("kserve.yaml")
    runtime, service = found["ServingRuntime"], found["InferenceService"]
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    formats = {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert predictor["model"]["modelFormat"]["name"] in formats
    spec = {
        "containers": runtime["spec"]["containers"],
        "volumes": runtime["spec"]["volumes"],
        "securityContext": predictor["securityContext"],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pando"}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    modules = {container["command"][2] for container in spec["containers"]}
    services = {"tokenizer", "scheduler", "worker", "detokenizer"}
    assert modules == {"gateway", *(f"services.{name}" for name in services)}
    for container in spec["containers"]:
        environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        own = {name: value for name, value in environment.items() if name.startswith("PANDO_")}
        check_environment(own)
        settings = settings_with(own, {}, monkeypatch)
        assert (settings.gateway.port, settings.scheduler.metrics_port) == (SERVING_PORT, METRICS_PORT)
        assert settings.metrics.vllm_names
        # Each finds the others at the default addresses, on the pod's loopback interface.
        assert settings.gateway.tokenizer[0].startswith("127.0.0.1:")


def test_the_inference_pool_selects_these_pods_and_reads_metrics_that_they_have() -> None:
    pool = objects("inference-pool.yaml")
    for kind in ("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding"):
        kubernetes_validate.validate(pool[kind], KUBERNETES, strict=True)
    spec = pool["InferencePool"]["spec"]
    service = objects("kserve.yaml")["InferenceService"]["metadata"]["name"]
    assert spec["selector"]["matchLabels"] == {"serving.kserve.io/inferenceservice": service}
    assert spec["targetPorts"] == [{"number": SERVING_PORT}]
    assert spec["endpointPickerRef"]["name"] == pool["Service"]["metadata"]["name"]
    [backend] = pool["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["InferencePool"]["metadata"]["name"])
    [container] = pool["Deployment"]["spec"]["template"]["spec"]["containers"]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert flags["pool-name"] == pool["InferencePool"]["metadata"]["name"]
    assert flags["model-server-metrics-port"] == str(METRICS_PORT)
    ours = {name.name for names in NAMES.values() for name in names}
    read = {value for flag, value in flags.items() if flag.endswith("-metric")}
    assert read
    assert read <= ours


def test_only_open_webui_may_name_users_to_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = load("open-webui.yaml")
    gateway, page = overlay["services"]["gateway"], overlay["services"]["open-webui"]
    environment = load("compose.yaml")["services"]["gateway"]["environment"] | gateway["environment"]
    own = {name: value for name, value in environment.items() if name.startswith("PANDO_")}
    settings = settings_with(own, {}, monkeypatch).gateway
    address = page["networks"]["open-webui"]["ipv4_address"]
    assert settings.trusted_proxies == (f"{address}/32",)
    assert settings.user_header == "x-openwebui-user-id"
    assert page["environment"]["ENABLE_FORWARD_USER_INFO_HEADERS"] == "true"
    assert overlay["networks"]["open-webui"]["internal"] is True
    assert page["environment"]["OPENAI_API_BASE_URL"] == "http://gateway:8000/v1"


def test_litellm_reads_the_configuration_that_is_mounted_into_its_container() -> None:
    service = load("litellm.yaml")["services"]["litellm"]
    [mount] = service["volumes"]
    source, target, mode = mount.split(":")
    assert (ROOT / "deploy" / "compose" / source).resolve() == FOLDER / "litellm.yaml"
    assert target == service["command"][1]
    assert mode == "ro"
    configuration = yaml.safe_load((FOLDER / "litellm.yaml").read_text())
    named = {value for entry in configuration["model_list"] for value in entry["litellm_params"].values()}
    wanted = {value.removeprefix("os.environ/") for value in named if value.startswith("os.environ/")}
    assert wanted <= service["environment"].keys()
