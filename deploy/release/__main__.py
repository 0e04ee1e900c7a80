"""Builds what a release consists of: `python -m deploy.release --registry ghcr.io/OWNER --out dist`.

It builds and tags the images for the registry, writes a bill of materials for each (CycloneDX), and packages the chart
with the registry in its values, as an archive and as an OCI image layout. It publishes nothing: at the end, it writes
the commands that would.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from common.version import version
from deploy.release.bill import LISTING, bill_of_materials
from deploy.release.chart import package_chart, write_oci_layout

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "pando"
IMAGES = {
    "pando-services": "services.Dockerfile",
    "pando-worker-cpu": "worker-cpu.Dockerfile",
    "pando-worker-cuda": "worker-cuda.Dockerfile",
}


def main() -> int:
    """Build the release; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("--registry", required=True, help="registry and path of the images: ghcr.io/OWNER")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for bills and chart (dist)")
    parser.add_argument("--images", nargs="*", choices=IMAGES, default=list(IMAGES), help="images to build (all)")
    arguments = parser.parse_args()
    registry = arguments.registry.rstrip("/")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    try:
        tags = [build_image(name, registry, out) for name in arguments.images]
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    archive = package_chart(CHART, out, registry)
    write_oci_layout(CHART, archive, out / "chart")
    commands = [*(f"docker push {tag}" for tag in tags), f"helm push {archive} oci://{registry}/charts"]
    sys.stdout.write("\n  ".join(["To publish the release:", *commands]) + "\n")
    return 0


def build_image(name: str, registry: str, out: Path) -> str:
    """Build and tag an image, write its bill of materials, and return the tag.

    Raises:
        OSError: docker or git is not installed.
        subprocess.CalledProcessError: one of them failed.
    """
    tag = f"{registry}/{name}:{version()}"
    revision = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    arguments = ("--build-arg", f"VERSION={version()}", "--build-arg", f"REVISION={revision}", "--tag", tag)
    file = ROOT / "deploy" / "images" / IMAGES[name]
    subprocess.run(["docker", "build", *arguments, "--file", str(file), str(ROOT)], check=True)
    digest = _output("docker", "image", "inspect", "--format", "{{.Id}}", tag)
    listing = _output("docker", "run", "--rm", "--network", "none", "--entrypoint", "python", tag, "-c", LISTING)
    (out / f"{name}-{version()}.cdx.json").write_text(bill_of_materials(tag, digest, listing), encoding="utf-8")
    return tag


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
