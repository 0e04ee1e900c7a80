"""Values that mean nothing, or contradict each other, are refused with their name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.helm.chart import RenderError, render

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown top-level key": ({"gatway": {}}, "gatway"),
    "unknown key of a component": ({"scheduler": {"replicas": 2}}, "replicas"),
    "unknown section of settings": ({"settings": {"shceduler": {}}}, "shceduler"),
    "no ranks": ({"worker": {"tensorParallel": 0}}, "tensorParallel"),
    "no stages": ({"worker": {"pipelineParallel": 0}}, "pipelineParallel"),
    "stages that do not fit into pods": (
        {"worker": {"tensorParallel": 3, "pipelineParallel": 3, "ranksPerPod": 2}},
        "multiple",
    ),
    "ranks that do not fit into pods": ({"worker": {"tensorParallel": 4, "ranksPerPod": 3}}, "multiple"),
    "no groups": ({"groups": {"replicas": 0}}, "replicas"),
    "groups that share experts and are as many as others": (
        {"groups": {"dataParallel": 4, "replicas": 2}},
        "leave out groups.replicas",
    ),
    "groups that share experts and scale": (
        {"groups": {"dataParallel": 4, "autoscaling": {"mode": "hpa"}}},
        "groups.autoscaling.mode off",
    ),
    "groups that share experts by settings alone": (
        {"settings": {"scheduler": {"data_parallel": {"size": 2}}}},
        "settings.scheduler.data_parallel.size is 2 and groups.dataParallel 1",
    ),
    "another number of groups that share experts in settings": (
        {"groups": {"dataParallel": 4}, "settings": {"scheduler": {"data_parallel": {"size": 2}}}},
        "set groups.dataParallel",
    ),
    "roles that share experts by settings alone": (
        {"groups": {"roles": {"both": {"settings": {"scheduler": {"data_parallel": {"size": 2}}}}}}},
        "data_parallel.size is 2",
    ),
    "groups that share experts in separate pods": ({"groups": {"dataParallel": 4, "layout": "separate"}}, "together"),
    "groups that share experts and have several ranks": (
        {"groups": {"dataParallel": 2}, "worker": {"tensorParallel": 2}},
        "groups of one worker",
    ),
    "groups that share experts and have roles": (
        {"groups": {"dataParallel": 2, "roles": {"both": {}}}},
        "leave out one of them",
    ),
    "groups that share experts on GPUs and restart alone": (
        {"groups": {"dataParallel": 2}, "worker": {"device": "cuda"}},
        "needs worker.leaderWorkerSet.enabled",
    ),
    "groups that share experts and a device": (
        {"groups": {"dataParallel": 2}, "deviceTurns": {"create": True}},
        "deviceTurns needs one group",
    ),
    "unknown layout of groups": ({"groups": {"layout": "pods"}}, "layout"),
    "more pages than all": ({"groups": {"autoscaling": {"kvPercent": 101}}}, "kvPercent"),
    "groups that scale but are no pods": (
        {"groups": {"layout": "separate", "autoscaling": {"mode": "hpa"}}},
        "groups.layout",
    ),
    "groups over nodes whose schedulers are elsewhere": (
        {"groups": {"layout": "separate"}, "worker": {"leaderWorkerSet": {"enabled": True}}},
        "groups.layout",
    ),
    "unknown setting": ({"settings": {"scheduler": {"max_rowz": 4}}}, "max_rowz"),
    "unknown setting in a section of a section": ({"settings": {"scheduler": {"queue": {"polcy": "fair"}}}}, "polcy"),
    "setting of another kind": ({"settings": {"scheduler": {"max_rows": "many"}}}, "max_rows"),
    "setting out of its range": ({"settings": {"gateway": {"port": 70_000}}}, "port"),
    "setting without its value among the choices": ({"settings": {"log": {"level": "loud"}}}, "level"),
    "model of a gateway without a detokenizer": (
        {"settings": {"gateway": {"models": {"a": {"tokenizer": "a:1"}}}}},
        "detokenizer",
    ),
    "storage whose keyring is lost": (
        {"settings": {"worker": {"storage": {"location": "/storage"}}}},
        "keyring.create",
    ),
    "responses on a volume and in a state": (
        {"gateway": {"responses": {"create": True}, "state": {"url": "redis://x"}}},
        "gateway.responses",
    ),
    "volume without a source": ({"worker": {"extraVolumes": [{"name": "storage"}]}}, "extraVolumes"),
    "path of the API that is none": ({"ingress": {"paths": ["v1"]}}, "paths"),
    "groups in one pod and on two nodes": (
        {"groups": {"layout": "together"}, "worker": {"tensorParallel": 2, "ranksPerPod": 1}},
        "ranksPerPod",
    ),
    "unknown device": ({"worker": {"device": "tpu"}}, "device"),
    "gpu resource without a vendor": ({"worker": {"gpuResource": "gpu"}}, "gpuResource"),
    "hub's model without a repository": ({"model": {"reference": "Qwen/"}}, "reference"),
    "s3 address of a whole bucket": ({"model": {"reference": "s3://models"}}, "reference"),
    "gs address of a whole bucket": ({"model": {"reference": "gs://models"}}, "reference"),
    "gs address with an empty quantization": ({"model": {"reference": "gs://models/llama:"}}, "reference"),
    "key of a service account in the values": (
        {"model": {"reference": "gs://models/llama", "gs": {"key": "{}"}}},
        "gs",
    ),
    "path outside of the volume": ({"model": {"reference": "/data/llama"}}, "reference"),
    "path without a volume": ({"model": {"reference": "/models/llama"}}, "existingClaim"),
    "path out of the volume": (
        {"model": {"reference": "/models/../etc", "volume": {"existingClaim": "models"}}},
        "reference",
    ),
    "quantity with a wrong unit": ({"worker": {"sharedMemory": "2GB"}}, "sharedMemory"),
    "unknown way to scale": ({"gateway": {"autoscaling": {"mode": "vpa"}}}, "mode"),
    "more than all of the processors": ({"gateway": {"autoscaling": {"cpuPercent": 101}}}, "cpuPercent"),
    "turns of several groups": ({"deviceTurns": {"create": True}, "groups": {"replicas": 2}}, "one group"),
    "turns of groups that scale": (
        {"deviceTurns": {"existingClaim": "turns"}, "groups": {"autoscaling": {"mode": "hpa"}}},
        "one group",
    ),
    "turns of ranks in several pods": (
        {"deviceTurns": {"create": True}, "worker": {"tensorParallel": 2, "ranksPerPod": 1}},
        "all ranks in one pod",
    ),
    "only groups that prefill": ({"groups": {"roles": {"prefill": {}}}}, "serve requests"),
    "decode groups without a host tier": ({"groups": {"roles": {"prefill": {}, "decode": {}}}}, "host_tier"),
    "unknown role": ({"groups": {"roles": {"encode": {}}}}, "encode"),
    "no groups of a role": ({"groups": {"roles": {"both": {"replicas": 0}}}}, "replicas"),
    "roles of groups on different devices": ({"groups": {"roles": {"both": {"worker": {"device": "cuda"}}}}}, "roles"),
    "unknown setting of a role": (
        {"groups": {"roles": {"both": {"settings": {"scheduler": {"max_rowz": 4}}}}}},
        "max_rowz",
    ),
    "settings of the gateway for a role": ({"groups": {"roles": {"both": {"settings": {"gateway": {}}}}}}, "gateway"),
    "roles of models that take turns": (
        {"deviceTurns": {"create": True}, "groups": {"roles": {"both": {}}}},
        "groups.roles",
    ),
    "stages that cannot read each other's pages": (
        {"groups": {"roles": {"both": {}, "prefill": {"worker": {"pipelineParallel": 2}}}}},
        "equal ranks",
    ),
    "ranks of a role that do not fit into pods": (
        {"groups": {"roles": {"both": {"worker": {"tensorParallel": 4, "ranksPerPod": 3}}}}},
        "multiple",
    ),
    "encoders of a model in stages": (
        {"encoder": {"replicas": 1}, "worker": {"pipelineParallel": 2}},
        "encoder.replicas",
    ),
    "encoders of groups in stages": (
        {"encoder": {"replicas": 1}, "groups": {"roles": {"both": {"worker": {"pipelineParallel": 2}}}}},
        "encoder.replicas",
    ),
    "encoders of models that take turns": (
        {"encoder": {"replicas": 1}, "deviceTurns": {"create": True}},
        "encoder.replicas",
    ),
    "encoders without images": (
        {"encoder": {"replicas": 1}, "settings": {"model": {"images": "off"}}},
        "settings.model.images",
    ),
    "encoders on another device": ({"encoder": {"device": "cpu"}}, "device"),
    "encoders in ranks": ({"encoder": {"tensorParallel": 2}}, "tensorParallel"),
    "fewer than no encoders": ({"encoder": {"replicas": -1}}, "replicas"),
    "ingress for nobody": ({"ingress": {"enabled": True}}, "hosts"),
    "route without a parent": ({"httpRoute": {"enabled": True}}, "parentRefs"),
    "port beyond the last": ({"gateway": {"service": {"port": 70_000}}}, "port"),
    "pull policy in another spelling": ({"image": {"pullPolicy": "always"}}, "pullPolicy"),
    "secret with a capital": ({"apiKeys": {"existingSecret": "Keys"}}, "existingSecret"),
    "clients' certificates over HTTP": ({"gateway": {"clientAuthoritySecret": "partners"}}, "certificateSecret"),
    "certificates of some services": ({"tls": {"existingSecrets": {"gateway": "edge"}}}, "existingSecrets"),
    "one certificate for all services": ({"tls": {"existingSecret": "ring"}}, "existingSecret"),
    "names of an unknown role": ({"tls": {"peerNames": {"janitor": ["a.example"]}}}, "peerNames"),
    "pattern as the name of a role": ({"tls": {"peerNames": {"operator": ["*.example"]}}}, "peerNames"),
    "trust domain with a scheme": ({"tls": {"trustDomain": "spiffe://llm"}}, "trustDomain"),
    "peer without anything": ({"networkPolicy": {"gatewayFrom": [{}]}}, "gatewayFrom"),
    "number as text": ({"gateway": {"replicas": "2"}}, "replicas"),
    "several gateways without a state": ({"gateway": {"replicas": 2}}, "gateway.state"),
    "an autoscaler of gateways without a state": ({"gateway": {"autoscaling": {"mode": "hpa"}}}, "gateway.state"),
    "a state that is no server": ({"gateway": {"state": {"url": "postgres://x"}}}, "url"),
    "a password in a ConfigMap": ({"gateway": {"state": {"url": "redis://:secret@x:6379"}}}, "url"),
    "a state twice": ({"gateway": {"state": {"url": "redis://x", "existingSecret": "x"}}}, "not both"),
    "a secret for one gateway": ({"gateway": {"state": {"signingSecret": "x"}}}, "signingSecret"),
    "a state that fails in a third way": ({"gateway": {"state": {"failure": "shut"}}}, "failure"),
}


ACCEPTED: list[dict[str, Any]] = [
    {"replicas": 1},
    {"autoscaling": {"mode": "hpa", "minReplicas": 1, "maxReplicas": 1}},
    {"replicas": 2, "state": {"url": "redis://[fd00::1]:6379/1"}},
    {"replicas": 2, "state": {"existingSecret": "state"}},
]


@pytest.mark.parametrize("gateway", ACCEPTED)
def test_is_accepted(gateway: dict[str, Any]) -> None:
    assert render({"gateway": gateway})


@pytest.mark.parametrize(("values", "said"), REFUSED.values(), ids=REFUSED)
def test_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RenderError) as refused:
        render(values)
    assert said in str(refused.value)
