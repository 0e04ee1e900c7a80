"""A release: images for a registry with bills of materials, and a chart that renders with that registry."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import helm_python
import pytest

from common.version import version
from deploy.release.__main__ import CHART, IMAGES, ROOT
from deploy.release.bill import LISTING, bill_of_materials
from deploy.release.chart import package_chart, write_oci_layout

REGISTRY = "registry.example/llm"
# Answers as docker does, and writes down what it was asked for. It lists the packages of the tests' own environment.
DOCKER = """#!{python}
import json, os, subprocess, sys
with open(os.environ["ASKED"], "a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "build" and os.environ.get("FAILS"):
    sys.exit(1)
if sys.argv[1:3] == ["image", "inspect"]:
    print("sha256:0123")
if sys.argv[1] == "run":
    sys.exit(subprocess.run([sys.executable, *sys.argv[sys.argv.index("-c"):]]).returncode)
"""


def run(tmp_path: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Make a release with a stand-in for docker; return the process and the calls of docker."""
    docker, asked = tmp_path / "bin" / "docker", tmp_path / "asked"
    docker.parent.mkdir()
    docker.write_text(DOCKER.format(python=sys.executable))
    docker.chmod(docker.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {"PATH": f"{docker.parent}:{os.environ['PATH']}", "ASKED": str(asked)} | variables
    command = [
        sys.executable,
        "-m",
        "deploy.release",
        "--registry",
        REGISTRY,
        "--out",
        str(tmp_path / "dist"),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=ROOT)
    return done, [json.loads(line) for line in asked.read_text().splitlines()]


def test_images_are_built_for_the_registry_and_nothing_is_published(tmp_path: Path) -> None:
    done, calls = run(tmp_path)
    assert done.returncode == 0, done.stderr
    builds = [call for call in calls if call[0] == "build"]
    tags = [f"{REGISTRY}/{name}:{version()}" for name in IMAGES]
    assert [call[call.index("--tag") + 1] for call in builds] == tags
    for call, file in zip(builds, IMAGES.values(), strict=True):
        assert Path(call[call.index("--file") + 1]).name == file
        assert f"VERSION={version()}" in call
        assert any(re.fullmatch("REVISION=[0-9a-f]{40}", part) for part in call)
    assert not [call for call in calls if call[0] == "push"]
    assert [line.strip() for line in done.stdout.splitlines()[-4:-1]] == [f"docker push {tag}" for tag in tags]
    for name in IMAGES:
        bill = json.loads((tmp_path / "dist" / f"{name}-{version()}.cdx.json").read_text())
        urls = {component["purl"] for component in bill["components"]}
        assert any(url.startswith("pkg:pypi/grpcio@") for url in urls)
        assert len(urls) == len(bill["components"]) > 10
    assert (tmp_path / "dist" / f"pando-{version()}.tgz").is_file()


def test_a_failed_build_ends_the_release(tmp_path: Path) -> None:
    done, calls = run(tmp_path, FAILS="1")
    assert done.returncode == 1
    assert [call[0] for call in calls] == ["build"]
    assert "returned non-zero exit status" in done.stderr


def test_bills_have_the_form_of_cyclonedx() -> None:
    listing = '["pypi", "some-package", "1.0+x", "MIT"]\n["deb/debian", "libc6", "2.36-9", ""]\n'
    bill = json.loads(bill_of_materials("a/b:1", "sha256:01", listing))
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch("urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])
    assert bill["metadata"]["component"] == {
        "type": "container",
        "bom-ref": "a/b:1",
        "name": "a/b:1",
        "version": "sha256:01",
    }
    assert [component["purl"] for component in bill["components"]] == [
        "pkg:deb/debian/libc6@2.36-9",
        "pkg:pypi/some-package@1.0%2Bx",
    ]
    assert bill["components"][1]["licenses"] == [{"license": {"name": "MIT"}}]


def test_the_listing_runs_in_any_python() -> None:
    compile(LISTING, "listing", "exec")


def test_the_packaged_chart_renders_as_the_folder_does_with_the_registry(tmp_path: Path) -> None:
    archive = package_chart(CHART, tmp_path, REGISTRY)
    texts = helm_python.Chart.load(archive).render({}, name="demo", namespace="llm")
    folder = helm_python.Chart.load(CHART).render({"image": {"registry": REGISTRY}}, name="demo", namespace="llm")
    assert texts == folder
    assert f"{REGISTRY}/pando-services:{version()}" in "".join(texts.values())


def test_a_chart_is_packaged_to_the_same_bytes_each_time(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (package_chart(CHART, tmp_path / name, REGISTRY) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_the_layout_has_each_blob_under_its_digest(tmp_path: Path) -> None:
    archive = package_chart(CHART, tmp_path, REGISTRY)
    layout = tmp_path / "layout"
    digest = write_oci_layout(CHART, archive, layout)
    blobs = {f"sha256:{path.name}": path.read_bytes() for path in (layout / "blobs" / "sha256").iterdir()}
    assert all(f"sha256:{hashlib.sha256(data).hexdigest()}" == name for name, data in blobs.items())
    [entry] = json.loads((layout / "index.json").read_text())["manifests"]
    assert (entry["digest"], entry["annotations"]) == (digest, {"org.opencontainers.image.ref.name": version()})
    manifest = json.loads(blobs[digest])
    [content] = manifest["layers"]
    assert blobs[content["digest"]] == archive.read_bytes()
    assert content["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    assert json.loads(blobs[manifest["config"]["digest"]])["name"] == "pando"
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}


@pytest.mark.parametrize("arguments", [(), ("--registry",)])
def test_the_registry_is_required(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "deploy.release", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "--registry" in done.stderr
