"""Bills of materials of images, in CycloneDX 1.6: their Python distributions and Debian packages.

The image lists them itself; `cyclonedx-bom` would list the former only.
"""

from __future__ import annotations

import json
import uuid
from typing import TypeAlias
from urllib.parse import quote

Component: TypeAlias = dict[str, object]

# Run in the image by its interpreter: one JSON list for each component.
LISTING = """
import json, re, shutil, subprocess
from importlib.metadata import distributions
for each in distributions():
    name = re.sub("[-_.]+", "-", each.metadata["Name"]).lower()
    licence = each.metadata["License-Expression"] or each.metadata["License"] or ""
    print(json.dumps(["pypi", name, each.version, licence.strip().split("\\n")[0]]))
if shutil.which("dpkg-query"):
    listed = subprocess.check_output(["dpkg-query", "-W", "-f", "${Package} ${Version}\\n"], text=True)
    for line in listed.splitlines():
        print(json.dumps(["deb/debian", *line.split(), ""]))
"""


def bill_of_materials(image: str, digest: str, listing: str) -> str:
    """Return the bill of `image` from the output of `LISTING` in it."""
    components = [_component(*json.loads(line)) for line in sorted(set(listing.splitlines())) if line]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{image}@{digest}')}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": image, "name": image, "version": digest}},
        "components": components,
    }
    return json.dumps(bill, indent=2) + "\n"


def _component(kind: str, name: str, version: str, licence: str) -> Component:
    purl = f"pkg:{kind}/{quote(name)}@{quote(version)}"
    component: Component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licence:
        component["licenses"] = [{"license": {"name": licence}}]
    return component
