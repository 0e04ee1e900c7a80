"""The chart as tests see it: rendered by the Helm SDK from PyPI, and by a real `helm` where there is one."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import helm_python
import yaml

from common.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import SecretStr

# Manifests are free-form.
Manifest: TypeAlias = dict[str, Any]

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "pando"
RELEASE, NAMESPACE = "demo", "llm"
COMPONENT = "app.kubernetes.io/component"
# All but the gateway.
SERVICES = ("tokenizer", "scheduler", "worker", "detokenizer")
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
# Where Kubernetes and LeaderWorkerSet say the number of a pod, from 0.
INDEX_LABELS = {
    "StatefulSet": "metadata.labels['apps.kubernetes.io/pod-index']",
    "LeaderWorkerSet": "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']",
}


class RenderError(Exception):
    """The chart refuses these values; the message says why."""


@cache
def _loaded() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render_texts(values: Manifest, release: str = RELEASE) -> dict[str, str]:
    """Return the rendered text of each template.

    Raises:
        RenderError: the schema or a template refuses the values.
    """
    try:
        return _rendered(json.dumps(values), release)
    except helm_python.HelmError as error:
        raise RenderError(str(error)) from error


@cache
def _rendered(values: str, release: str) -> dict[str, str]:
    # Many tests look at the same few releases.
    return _loaded().render(json.loads(values), name=release, namespace=NAMESPACE)


def render(values: Manifest, release: str = RELEASE) -> list[Manifest]:
    """Return all objects of a release with these values."""
    objects: list[Manifest] = pickle.loads(_parsed(json.dumps(values), release))
    return objects


@cache
def _parsed(values: str, release: str) -> bytes:
    """Return the objects of a release, pickled: every test gets its own, sooner than YAML is parsed again."""
    texts = render_texts(json.loads(values), release)
    return pickle.dumps(_objects(texts[name] for name in sorted(texts) if name.endswith(".yaml")))


def helm_executable() -> str | None:
    """Return where the real `helm` is, if it is here."""
    return shutil.which("helm")


def render_with_helm(values: Manifest) -> list[Manifest]:
    """Return the output of the real `helm template`."""
    executable = helm_executable()
    assert executable is not None
    command = [executable, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RenderError(done.stderr)
    return _objects([done.stdout])


def named(objects: list[Manifest], kind: str, component: str) -> Manifest:
    """Return the one object of `kind` that belongs to `component`."""
    found = [item for item in objects if item["kind"] == kind and component_of(item) == component]
    assert len(found) == 1, f"{len(found)} objects are {kind} of {component}"
    return found[0]


def component_of(item: Manifest) -> str:
    return str(item["metadata"]["labels"][COMPONENT])


def pods(objects: list[Manifest]) -> dict[str, Manifest]:
    """Return the pod template of each component; of those with several groups, the last one's."""
    return {component_of(template): template for item in objects for template in templates_of(item)}


def templates_of(item: Manifest) -> list[Manifest]:
    """Return the templates of a workload's pods: two if the first pod of a group differs from the others."""
    if item["kind"] not in WORKLOADS:
        return []
    spec = item["spec"]
    if "leaderWorkerTemplate" in spec:
        first, others = (spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate"))
        return [first] if first == others else [first, others]
    return [spec["template"]]


def container(template: Manifest) -> Manifest:
    found: Manifest = template["spec"]["containers"][0]
    return found


@dataclass(frozen=True)
class Running:
    """A container in a pod: the pod's component and labels, the service, and the settings that it reads."""

    service: str
    workload: Manifest
    template: Manifest
    container: Manifest
    settings: Settings

    @property
    def section(self) -> str:
        """The service whose module, settings and certificate it has: an encoder is a worker."""
        return "worker" if self.service == "encoder" else self.service


def running(objects: list[Manifest]) -> list[Running]:
    """Return every service of every pod, as it would run in the first pod of its kind."""
    found = []
    for workload, template in [(item, template) for item in objects for template in templates_of(item)]:
        sidecars = [item for item in template["spec"].get("initContainers", []) if item.get("restartPolicy")]
        for item in [*template["spec"]["containers"], *sidecars]:
            file = _mounted_settings(objects, template, item)
            settings = _settings(json.dumps([file, item["env"], f"{workload['metadata']['name']}-0"]))
            found.append(Running(item["name"], workload, template, item, settings))
    # Tests look at each of them, and there is no release without these.
    assert {"gateway", "tokenizer", "scheduler", "worker", "detokenizer"} <= {each.service for each in found}
    return found


def settings_of(objects: list[Manifest], service: str) -> Manifest:
    """Return the settings file of a service, parsed."""
    return tomllib.loads(named(objects, "ConfigMap", f"{service}-settings")["data"]["pando.toml"])


def _mounted_settings(objects: list[Manifest], template: Manifest, container: Manifest) -> Manifest:
    [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == "/etc/pando/pando.toml"]
    [volume] = [each for each in template["spec"]["volumes"] if each["name"] == mount["name"]]
    name = volume["configMap"]["name"]
    [file] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", name)]
    return tomllib.loads(file["data"][mount["subPath"]])


def role_of(item: Manifest) -> str | None:
    """Return the role of the groups that an object or a pod template belongs to, if groups have roles."""
    role: str | None = item["metadata"]["labels"].get("pando/role")
    return role


def group_of(running: Running) -> tuple[str | None, str | None]:
    """Return the role and the number of a pod's group, as far as its labels name them."""
    labels = running.template["metadata"]["labels"]
    return (labels.get("pando/role"), labels.get("pando/group"))


def selected(objects: list[Manifest], service: str) -> set[str]:
    """Return the names of the workloads whose pods a Service stands for."""
    [selector] = [
        item["spec"]["selector"]
        for item in objects
        if item["kind"] == "Service" and item["metadata"]["name"] == service
    ]
    return {
        item["metadata"]["name"]
        for item in objects
        for template in templates_of(item)
        if selector.items() <= template["metadata"]["labels"].items()
    }


def host_of(addresses: Sequence[str]) -> str:
    """Return the host name of the only address."""
    [address] = addresses
    return address.removeprefix("dns:").partition(":")[0]


def mounted_secret(each: Running, setting: SecretStr | None) -> tuple[str, str]:
    """Return the Secret and the key that a container reads for a setting, whose value names a file."""
    assert setting is not None
    prefix, _, path = setting.get_secret_value().partition(":")
    assert prefix == "file"
    directory, _, key = path.rpartition("/")
    mounts = {mount["mountPath"]: mount["name"] for mount in each.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in each.template["spec"]["volumes"]}
    return volumes[mounts[directory]]["secret"]["secretName"], key


@cache
def _settings(text: str) -> Settings:
    """Return the settings of a process from JSON of its file, variables and pod's name: many tests read the same."""
    file, variables, pod = json.loads(text)
    return _with_variables(file, variables, pod)


def _with_variables(merged: Manifest, variables: list[Manifest], pod: str) -> Settings:
    """Return the settings of a process: the file's, and over them those of its environment."""
    for variable in variables:
        *sections, field = variable["name"].removeprefix("PANDO_").lower().split("__")
        if sections and variable["name"].startswith("PANDO_"):
            text = _value_of(variable).replace("$(POD_NAME)", pod)
            section = merged
            for name in sections:
                section = section.setdefault(name, {})
            section[field] = json.loads(text) if text.startswith("[") else text
    return Settings(**merged)


def _value_of(variable: Manifest) -> str:
    """Return the value of a variable in the first pod of its kind."""
    source = variable.get("valueFrom", {})
    if source.get("fieldRef", {}).get("fieldPath") in INDEX_LABELS.values():
        return "0"
    # What a secret holds is not known here; it must be long enough.
    value: str = variable.get("value", "the value of a secret")
    return value


def _objects(texts: Any) -> list[Manifest]:
    return [item for text in texts for item in yaml.load_all(text, yaml.CSafeLoader) if item]
