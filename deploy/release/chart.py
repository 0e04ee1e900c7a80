"""Packages the Helm chart: as an archive, as `helm package` does, and as an OCI image layout for a registry."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_TYPE = "application/vnd.cncf.helm.config.v1+json"
CONTENT_TYPE = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"


def package_chart(chart: Path, out: Path, registry: str) -> Path:
    """Write <name>-<version>.tgz of the chart in the folder `chart`, and return its path.

    `image.registry` in its values is `registry`. The same input gives the same bytes.
    """
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(path for path in chart.rglob("*") if path.is_file()):
            data = path.read_bytes()
            if path == chart / "values.yaml":
                data = _with_registry(data.decode(), registry).encode()
            entry = tarfile.TarInfo(f"{about['name']}/{path.relative_to(chart)}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    target = out / f"{about['name']}-{about['version']}.tgz"
    target.write_bytes(gzip.compress(content.getvalue(), mtime=0))
    return target


def write_oci_layout(chart: Path, archive: Path, out: Path) -> str:
    """Write the OCI image layout of a packaged chart to the folder `out`, and return the manifest's digest."""
    about: dict[str, Any] = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))  # Any: its own fields
    config = _store(out, json.dumps(about, sort_keys=True).encode(), CONFIG_TYPE)
    content = _store(out, archive.read_bytes(), CONTENT_TYPE)
    annotations = {
        "org.opencontainers.image.title": about["name"],
        "org.opencontainers.image.version": about["version"],
        "org.opencontainers.image.description": about["description"],
    }
    manifest = _store(
        out,
        json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": config,
                "layers": [content],
                "annotations": annotations,
            }
        ).encode(),
        MANIFEST_TYPE,
    )
    tagged = manifest | {"annotations": {"org.opencontainers.image.ref.name": about["version"]}}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [tagged]}
    (out / "index.json").write_text(json.dumps(index), encoding="utf-8")
    (out / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}), encoding="utf-8")
    return str(manifest["digest"])


def _with_registry(values: str, registry: str) -> str:
    line = '  registry: ""\n'
    assert values.count(line) == 1, "values.yaml has one image.registry"
    return values.replace(line, f"  registry: {json.dumps(registry)}\n")


def _store(out: Path, data: bytes, media_type: str) -> dict[str, str | int]:
    """Write a blob, and return its descriptor."""
    digest = hashlib.sha256(data).hexdigest()
    blobs = out / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}
