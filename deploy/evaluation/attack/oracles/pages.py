"""Pages for operators: what do metrics and the like say of one request to somebody who is no administrator?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict
from deploy.evaluation.attack.inventions import REMOTE
from deploy.evaluation.attack.prober import NO_KEY, Disguise
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deploy.evaluation.attack.scene import Scene

ORACLE = "metrics"
CONTROL = "metrics for an administrator (control)"
PATHS = (
    "/metrics",
    "/openapi.json",
    "/get_server_info",
    "/server_info",
    "/get_model_info",
    "/v1/models",
    "/health",
    "/ready",
)
# Unlike any other request's.
VICTIM_TOKENS = 997
# Where prompts are words, their length in tokens is not exact.
TOLERANCE = 0.1
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*(?:\{.*\})?)\s+([0-9.eE+-]+)\s*$", re.MULTILINE)
FIELD = re.compile(r'"([^"]+)"\s*:\s*([0-9.eE+-]+)')

Pages = dict[tuple[str, str], bytes]


async def probe_pages(scene: Scene) -> list[Finding]:
    """Read every page before and after a victim's request, with each credential that is no administrator's."""
    credentials = scene.server.credentials
    readers = {"no key": Disguise({}, REMOTE, NO_KEY)}
    if scene.server.has_keys:
        readers |= {"the own tenant's key": Disguise(), "no key, on this machine": Disguise(api_key=NO_KEY)}
    if credentials.rival is not None:
        readers["another tenant's key"] = Disguise(api_key=credentials.rival)
    revealed, read = await _revealed(scene, readers)
    note = f"{read} of {len(readers) * len(PATHS)} pages can be read"
    verdict = OracleVerdict.LEAKS if revealed else OracleVerdict.CLOSED
    findings = [Finding(ORACLE, verdict, 2 * len(readers) * len(PATHS), note=revealed or note)]
    if credentials.admin is not None:
        seen, _ = await _revealed(scene, {"admin": Disguise(api_key=credentials.admin)})
        verdict = OracleVerdict.LEAKS if seen else OracleVerdict.CLOSED
        findings.append(Finding(CONTROL, verdict, 2 * len(PATHS), note=seen, is_control=True))
    return findings


async def _revealed(scene: Scene, readers: Mapping[str, Disguise]) -> tuple[str, int]:
    """Return which page counts a victim's request, if one does, and how many could be read."""
    before = await _read(scene, readers)
    await scene.prober.ask((Segment(f"document/{scene.name()}", VICTIM_TOKENS),), scene.user("victim"))
    after = await _read(scene, readers)
    for (reader, path), body in after.items():
        shown = counts(before.get((reader, path), b""), body, VICTIM_TOKENS)
        if shown:
            return f"{path} with {reader}: {shown}", len(after)
    return "", len(after)


async def _read(scene: Scene, readers: Mapping[str, Disguise]) -> Pages:
    found: Pages = {}
    for reader, disguise in readers.items():
        for path in PATHS:
            status, body = await scene.prober.get(path, disguise)
            if status == 200:
                found[reader, path] = body
    return found


def counts(before: bytes, after: bytes, tokens: int) -> str:
    """Return the name of a number that has grown by about `tokens` between two readings, empty if none has."""
    old = _numbers(before)
    for name, value in _numbers(after).items():
        grown = value - old.get(name, 0.0)
        if (1 - TOLERANCE) * tokens <= grown <= (1 + TOLERANCE) * tokens:
            return name
    return ""


def _numbers(body: bytes) -> dict[str, float]:
    text = body.decode(errors="replace")
    pattern = FIELD if text.lstrip().startswith("{") else SAMPLE
    found: dict[str, float] = {}
    for match in pattern.finditer(text):
        try:
            found[match[1]] = float(match[2])
        except ValueError:
            continue
    return found
