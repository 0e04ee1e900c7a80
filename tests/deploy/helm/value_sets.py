"""The values that the chart is rendered with: one set for each way to run it, and the examples that it ships."""

from __future__ import annotations

from typing import Any

import yaml

from tests.deploy.helm.chart import CHART

_CLAIM = {"reference": "/models/llama", "volume": {"existingClaim": "models"}}


def _scaled(mode: str) -> dict[str, Any]:
    scaling = {"mode": mode, "minReplicas": 2, "maxReplicas": 9, "pending": 100}
    state = {"existingSecret": "state"}
    return {"gateway": {"autoscaling": scaling, "state": state}, "tokenizer": {"autoscaling": scaling}}


VALUE_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "hpa": _scaled("hpa"),
    "keda": _scaled("keda"),
    "several-gateways": {
        "gateway": {
            "replicas": 3,
            "state": {
                "url": "rediss://state.example:6380/2",
                "signingSecret": "signing",
                "port": 6380,
                "failure": "closed",
            },
        },
        "networkPolicy": {"stateTo": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]},
    },
    "three-groups": {
        "groups": {"replicas": 3},
        "adminToken": {"existingSecret": "admin"},
        "worker": {"tensorParallel": 2, "ranksPerPod": 1},
        "tls": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "settings": {"tokenizer": {"routing": {"policy": "least_loaded"}}},
    },
    "groups-over-nodes": {
        "groups": {"replicas": 2},
        "worker": {"device": "cuda", "tensorParallel": 16, "ranksPerPod": 8, "leaderWorkerSet": {"enabled": True}},
        "model": _CLAIM,
    },
    "separate": {"groups": {"layout": "separate", "replicas": 2}, "tls": {"enabled": True}},
    "state-on-volumes": {
        "keyring": {"create": True, "storageClass": "shared", "existingSecret": "keyring"},
        "audit": {"create": True, "size": "5Gi"},
        "gateway": {"responses": {"existingClaim": "responses"}},
        "settings": {"worker": {"storage": {"location": "/storage"}}, "scheduler": {"host_tier": {"gigabytes": 1}}},
        "worker": {
            "extraVolumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": "pages"}}],
            "extraVolumeMounts": [{"name": "storage", "mountPath": "/storage"}],
        },
    },
    "signed-tokens": {
        "settings": {
            "gateway": {
                "jwt": {"keys": "https://id.example/keys", "issuer": "https://id.example", "audience": "pando"},
            }
        },
        "networkPolicy": {"jwksTo": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]},
    },
    "traced": {
        "settings": {"tracing": {"endpoint": "http://collector.observability:4317"}},
        "networkPolicy": {"tracingTo": [{"ipBlock": {"cidr": "10.8.0.0/16"}}]},
    },
    "own-contexts": {
        name: {
            "securityContext": {"runAsUser": 20_000},
            "podSecurityContext": {"fsGroup": 20_000},
            "labels": {"kueue.x-k8s.io/queue-name": "models"},
            "extraVolumes": [{"name": f"{name}-certificates", "configMap": {"name": "authorities"}}],
            "extraVolumeMounts": [{"name": f"{name}-certificates", "mountPath": "/authorities", "readOnly": True}],
        }
        for name in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
    },
    "groups-in-pods": {
        "groups": {"replicas": 4, "layout": "together"},
        "fleet": {"existingSecret": "fleet", "port": 6380},
        "networkPolicy": {"workerEgress": [{}], "fleetTo": [{"ipBlock": {"cidr": "10.1.2.4/32"}}]},
    },
    "groups-hpa": {"groups": {"layout": "together", "autoscaling": {"mode": "hpa", "kvPercent": 0}}},
    "groups-keda": {
        "groups": {"layout": "together", "autoscaling": {"mode": "keda", "minReplicas": 2, "maxReplicas": 6}},
        "worker": {
            "device": "cuda",
            "tensorParallel": 2,
            "nodeSelector": {"pool": "gpu"},
            "runtimeClassName": "nvidia",
        },
        "model": {"reference": "Qwen/Qwen3-8B"},
        "tls": {"enabled": True, "tokenSecret": "ring-token"},
        "adminToken": {"existingSecret": "admin"},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "two-ranks-in-a-pod": {
        "worker": {"device": "cuda", "tensorParallel": 2, "kernelCache": {"existingClaim": "kernels"}},
        "model": _CLAIM,
    },
    "four-pods-on-a-node": {
        "worker": {
            "device": "cuda",
            "tensorParallel": 4,
            "ranksPerPod": 1,
            "affinity": {"nodeAffinity": {}},
            "gpuResource": "amd.com/gpu",
        },
        "model": _CLAIM,
    },
    "leader-worker-set": {
        "worker": {
            "device": "cuda",
            "tensorParallel": 16,
            "ranksPerPod": 8,
            "leaderWorkerSet": {"enabled": True, "exclusiveTopology": "rack"},
        },
        "model": _CLAIM,
    },
    "stages-over-nodes": {
        "worker": {
            "device": "cuda",
            "tensorParallel": 8,
            "pipelineParallel": 2,
            "expertParallel": True,
            "ranksPerPod": 8,
            "leaderWorkerSet": {"enabled": True},
        },
        "model": _CLAIM,
    },
    "model-from-hub": {
        "model": {
            "reference": "Qwen/Qwen3-8B@v1.0",
            "hub": {"tokenSecret": "hub", "endpoint": "https://hub.example"},
            "volume": {"create": True, "storageClass": "fast"},
        }
    },
    "model-from-s3": {
        "model": {
            "reference": "s3://models/qwen3-8b",
            "s3": {"credentialsSecret": "aws", "region": "eu-north-1"},
            "servedName": "qwen",
        }
    },
    "model-from-gs": {
        "model": {
            "reference": "gs://models/team/qwen3-8b:Q4_K_M",
            "gs": {"credentialsSecret": "gcp", "endpoint": "http://storage.example"},
            "volume": {"create": True},
        }
    },
    "keys-and-admin": {
        "apiKeys": {"existingSecret": "keys"},
        "adminToken": {"existingSecret": "admin"},
        "networkPolicy": {"gatewayFrom": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]},
    },
    "limits": {"limits": "[default.each_subject]\nrequests_per_minute = 60\n[tenants.acme]\nweight = 2\n"},
    "limits-of-groups": {"limits": "[tenants.acme]\nweight = 2\n", "groups": {"layout": "together"}},
    "ingress": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["llm.example"],
            "tls": [{"hosts": ["llm.example"], "secretName": "llm-tls"}],
        },
        "gateway": {"service": {"type": "NodePort"}},
    },
    "http-route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["llm.example"]}},
    "monitoring": {
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True},
            "dashboards": {"enabled": True},
        },
        "worker": {"tensorParallel": 2},
    },
    "private-registry": {
        "image": {"registry": "registry.example/llm/", "tag": "1.2.3", "pullSecrets": [{"name": "pull"}]},
        "fullnameOverride": "served",
        "serviceAccount": {"create": False, "name": "existing"},
    },
    "placement": {
        name: {
            "nodeSelector": {"pool": name},
            "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "llm", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"note": "x"},
            "podLabels": {"team": "llm"},
            "priorityClassName": "high",
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "resources": {"requests": {"cpu": 2}},
            "disruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
        }
        for name in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
    },
    "own-authority": {"tls": {"enabled": True}, "worker": {"tensorParallel": 2}},
    "given-issuer": {
        "tls": {
            "enabled": True,
            "tokenSecret": "ring-token",
            "certManager": {"issuer": {"name": "corporate", "kind": "ClusterIssuer"}},
        },
        "gateway": {"certificateSecret": "llm-https"},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "clients-with-certificates": {
        "gateway": {"certificateSecret": "llm-https", "clientAuthoritySecret": "partners"},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "gateway-of-several-models": {
        "settings": {
            "gateway": {
                "models": {
                    "small": {"tokenizer": "demo-pando-tokenizer:50051", "detokenizer": "demo-pando-detokenizer:50054"},
                    "large": {
                        "tokenizer": "large-pando-tokenizer:50051",
                        "detokenizer": "large-pando-detokenizer:50054",
                    },
                }
            }
        },
        "networkPolicy": {
            "gatewayEgress": [{"to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "large"}}}]}]
        },
    },
    "model-for-another-gateway": {
        "networkPolicy": {
            "otherGateways": [
                {
                    "podSelector": {
                        "matchLabels": {
                            "app.kubernetes.io/instance": "front",
                            "app.kubernetes.io/component": "gateway",
                        }
                    }
                }
            ]
        }
    },
    "given-certificates": {
        "tls": {
            "enabled": True,
            "trustDomain": "llm.example",
            "peerNames": {"gateway": ["edge.example"]},
            "existingSecrets": {
                name: f"{name}-certificate" for name in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
            },
        },
        "groups": {"layout": "together"},
    },
    "roles": {
        "groups": {
            "autoscaling": {"mode": "keda", "waiting": 8},
            "roles": {
                "prefill": {"replicas": 2, "worker": {"tensorParallel": 2}},
                "decode": {
                    "replicas": 4,
                    "autoscaling": {"minReplicas": 3, "maxReplicas": 12, "waiting": 0, "rows": 200},
                    "scheduler": {"drainSeconds": 300},
                    "settings": {"scheduler": {"max_rows": 512}},
                },
            },
        },
        "worker": {"device": "cuda", "nodeSelector": {"pool": "gpu"}},
        "model": _CLAIM,
        "tls": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "settings": {"scheduler": {"max_rows": 256, "host_tier": {"gigabytes": 16}}},
    },
    "roles-over-nodes": {
        "groups": {
            "roles": {
                "both": {"layout": "separate", "replicas": 2, "worker": {"leaderWorkerSet": {"enabled": False}}},
                "prefill": {"worker": {"tensorParallel": 16, "leaderWorkerSet": {"exclusiveTopology": "rack"}}},
                "decode": {"replicas": 3, "autoscaling": {"mode": "hpa", "kvPercent": 70}},
            }
        },
        "worker": {
            "device": "cuda",
            "tensorParallel": 8,
            "ranksPerPod": 4,
            "leaderWorkerSet": {"enabled": True},
        },
        "model": _CLAIM,
        "tls": {"enabled": True},
        "settings": {"scheduler": {"host_tier": {"pages": 4096}}},
    },
    "roles-in-stages": {
        "groups": {"roles": {"prefill": {"replicas": 2}, "decode": {}}},
        "worker": {
            "device": "cuda",
            "tensorParallel": 8,
            "pipelineParallel": 2,
            "ranksPerPod": 8,
            "leaderWorkerSet": {"enabled": True},
        },
        "model": _CLAIM,
        "settings": {"scheduler": {"host_tier": {"gigabytes": 64}}},
    },
    "data-parallel": {
        "groups": {"dataParallel": 3},
        "tls": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "settings": {"scheduler": {"max_step_tokens": 256}},
    },
    "data-parallel-over-nodes": {
        "groups": {"dataParallel": 16},
        "worker": {"device": "cuda", "leaderWorkerSet": {"enabled": True}, "nodeSelector": {"pool": "gpu"}},
        "model": _CLAIM,
    },
    "device-turns": {
        "deviceTurns": {"existingClaim": "turns"},
        "groups": {"layout": "separate"},
        "worker": {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}},
        "settings": {"scheduler": {"device_turns": {"level": 2}}},
    },
    "encoders": {
        "model": {"reference": "Qwen/Qwen2.5-VL-7B-Instruct"},
        "groups": {"replicas": 2},
        "worker": {
            "device": "cuda",
            "tensorParallel": 2,
            "ranksPerPod": 1,
            "runtimeClassName": "nvidia",
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
        "encoder": {"replicas": 2, "gpuResource": "nvidia.com/mig-1g.10gb", "nodeSelector": {"pool": "slices"}},
        "tls": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "encoders-in-pods": {
        "model": {"reference": "Qwen/Qwen2.5-VL-7B-Instruct"},
        "groups": {"autoscaling": {"mode": "keda"}},
        "worker": {
            "device": "cuda",
            "extraVolumes": [{"name": "own", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
        },
        "encoder": {"replicas": 2},
        "tls": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "encoders-of-roles": {
        "groups": {
            "roles": {"prefill": {"replicas": 2, "layout": "separate", "encoder": {"replicas": 3}}, "decode": {}},
        },
        "tls": {"enabled": True},
        "settings": {"scheduler": {"host_tier": {"gigabytes": 1}}},
    },
    "encoders-over-nodes": {
        "worker": {
            "device": "cuda",
            "tensorParallel": 16,
            "ranksPerPod": 8,
            "leaderWorkerSet": {"enabled": True},
        },
        "encoder": {"replicas": 1},
        "model": _CLAIM,
        "tls": {"enabled": True},
    },
    "open-network": {"networkPolicy": {"enabled": False}, "settings": {"scheduler": {"max_rows": 128}}},
    "ipv6": {"listenHost": "[::]"},
} | {f"example-{path.stem}": yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))}

# With encoders in pods of their own, in those of groups, of some groups, and beside pods over nodes.
ENCODERS = ("encoders", "encoders-in-pods", "encoders-of-roles", "encoders-over-nodes")
