"""Models at gs:// addresses: what the chart's init container runs downloads them, and the services find them then."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.common.models.store_servers import STORES, Google, service_account, serving
from tests.deploy.helm.chart import named, pods, render, running
from tests.deploy.helm.value_sets import VALUE_SETS
from tests.waiting import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[3]
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
}
CLOUDS = ("AWS_", "GOOGLE_", "CLOUDSDK_", "STORAGE_", "HF_", "GCE_", "GCSFS_")


def fetching(values: Mapping[str, Any], component: str) -> dict[str, Any]:
    """Return the init container of a component's pods that downloads the model."""
    spec = pods(render(dict(values)))[component]["spec"]
    found: dict[str, Any] = next(item for item in spec["initContainers"] if item["name"] == "model")
    return found


def test_a_key_is_mounted_where_models_are_downloaded_and_nowhere_else() -> None:
    objects = render(VALUE_SETS["model-from-gs"])
    for component in ("tokenizer", "detokenizer", "group"):
        init = fetching(VALUE_SETS["model-from-gs"], component)
        environment = {entry["name"]: entry.get("value") for entry in init["env"]}
        assert environment["GOOGLE_APPLICATION_CREDENTIALS"] == "/credentials/key.json"
        assert environment["STORAGE_EMULATOR_HOST"] == "http://storage.example"
        assert "HF_TOKEN" not in environment
        [mount] = [each for each in init["volumeMounts"] if each["mountPath"] == "/credentials"]
        assert mount["readOnly"]
        volumes = {each["name"]: each for each in pods(objects)[component]["spec"]["volumes"]}
        assert volumes[mount["name"]]["secret"] == {"secretName": "gcp"}
    services = running(objects)
    assert services
    for each in services:
        assert all(mount["mountPath"] != "/credentials" for mount in each.container["volumeMounts"])


def test_without_a_key_pods_have_their_own_identity() -> None:
    annotation = {"iam.gke.io/gcp-service-account": "reader@project.iam.gserviceaccount.com"}
    values = {"model": {"reference": "gs://models/llama"}, "serviceAccount": {"annotations": annotation}}
    objects = render(values)
    [account] = [item for item in objects if item["kind"] == "ServiceAccount"]
    assert account["metadata"]["annotations"] == annotation
    pod = pods(objects)["tokenizer"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert not [each for each in pod["volumes"] if each["name"] == "model-credentials"]
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in {entry["name"] for entry in fetching(values, "tokenizer")["env"]}


@pytest.mark.parametrize(("gs", "is_open"), [({}, True), ({"credentialsSecret": "gcp"}, False)])
def test_the_metadata_server_can_be_reached_where_tokens_come_from_it(gs: dict[str, str], is_open: bool) -> None:
    objects = render({"model": {"reference": "gs://models/llama", "gs": gs}})
    for component, downloads in (("tokenizer", True), ("group", True), ("gateway", False)):
        rules = named(objects, "NetworkPolicy", component)["spec"]["egress"]
        ports = {port["port"] for rule in rules for port in rule.get("ports", [])}
        assert (988 in ports) == (is_open and downloads)


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.skipif(not STORES.is_dir(), reason="servers of stores' APIs are NOT installed: run `make stores`")
@pytest.mark.parametrize("component", ["tokenizer", "group"])
def test_the_services_find_what_the_init_container_has_downloaded(tmp_path: Path, component: str) -> None:
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with serving(Google()) as store:
        store.put("/models")
        for name, content in FILES.items():
            store.put(f"/models/team/tiny/{name}", content)
        store.refusal = (401, "Anonymous caller")
        (tmp_path / "key.json").write_text(service_account(store.url, key.decode()))
        values = {
            "model": {
                "reference": "gs://models/team/tiny",
                "gs": {"credentialsSecret": "gcp", "endpoint": store.url},
            }
        }
        init = fetching(values, component)
        given = {entry["name"]: entry["value"] for entry in init["env"]}
        # Where volumes are mounted.
        given |= {"HF_HOME": str(tmp_path), "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
        # With an account, the client would ask for the kind of the bucket by gRPC, which the emulator does not speak.
        own = Google().environment(store.url) | {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        command: list[str] = init["command"] + init["args"]
        assert command[0] == "python"
        run(command[1:], own | given)
        assert store.tokens
        assert None not in store.tokens
    each = next(each for each in running(render(values)) if each.service in (component, "scheduler"))
    assert each.settings.model.reference == "gs://models/team/tiny"
    # The store is away now.
    service = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    weights = ["--no-weights"] if component == "tokenizer" else []
    last = run(["-m", "common.models.pull", each.settings.model.reference, *weights], service).splitlines()[-1]
    found = {file.name: file.read_bytes() for file in Path(json.loads(last)["path"]).iterdir()}
    left_out = {"model.safetensors"} if component == "tokenizer" else set()
    assert found == {name: content for name, content in FILES.items() if name not in left_out}


def run(command: list[str], environment: Mapping[str, str]) -> str:
    """Run Python with the clients of stores as containers do; return what it has reported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLOUDS)}
    done = subprocess.run(
        [str(STORES / "python"), *command],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
