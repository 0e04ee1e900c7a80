"""The storage tier: is one user's stored text read for another one, and is a forged page accepted?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.oracles.pairs import report_cached
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deploy.evaluation.attack.oracles.pairs import Pair
    from deploy.evaluation.attack.prober import ProbeAnswer, Prober
    from deploy.evaluation.attack.scene import Scene

STORAGE = "storage reads"
# How long writing may take: so many looks, so far apart.
LOOKS = 16
STORED_POLL_S = 1.0
FORGED = "forged storage"
ANSWER_TOKENS = 8
# Pages of a text; the last token of a prompt is always computed, so the last page is never read.
TEXT_PAGES = 4
PATIENCE_S = 30.0
POLL_S = 0.5
# So long without a new file means that everything has been stored.
QUIET_S = 1.5
StoredObjects = dict["Path", bytes]


async def probe_storage(scene: Scene) -> list[Finding]:
    """Let victims ask one server, and attackers the other."""
    sibling = scene.sibling
    if sibling is None:
        return [not_applicable(STORAGE, "no second server over the same storage")]
    texts = [(scene.texts.document(scene.name()), scene.user("victim")) for _ in range(scene.effort.stored_texts)]
    for text, victim in texts:
        await scene.prober.ask(text, victim)
    if not await _is_stored(scene, sibling):
        return [not_applicable(STORAGE, "the storage gives nothing back, not even to its owner")]
    seen: list[Pair] = []
    found = 0
    for text, victim in texts:
        attacker, other = scene.user("attacker"), scene.texts.document(scene.name())
        seen.append((await sibling.ask(text, attacker), await sibling.ask(other, attacker)))
        found += bool((await sibling.ask(text, victim)).cached_tokens)
    return [report_cached(STORAGE, seen, f"owners find {found} of {len(texts)} again")]


async def _is_stored(scene: Scene, sibling: Prober) -> bool:
    """Wait until the other server reads for its owner what was stored after all else.

    A server that has been asked once has it in memory, so each look uses a text of its own.
    """
    owner = scene.user("owner")
    canaries = [scene.texts.document(scene.name()) for _ in range(LOOKS)]
    for canary in canaries:
        await scene.prober.ask(canary, owner)
    for canary in canaries:
        if (await sibling.ask(canary, owner)).cached_tokens:
            return True
        await scene.prober.clock.sleep(STORED_POLL_S)
    return False


def flip(victims: StoredObjects, _planted: StoredObjects) -> StoredObjects:
    """Flip a bit in the middle of every file."""
    forged = {path: bytearray(data) for path, data in victims.items()}
    for data in forged.values():
        data[len(data) // 2] ^= 1
    return {path: bytes(data) for path, data in forged.items()}


def cut(victims: StoredObjects, _planted: StoredObjects) -> StoredObjects:
    """Cut the second half of every file off."""
    return {path: data[: len(data) // 2] for path, data in victims.items()}


def swap(victims: StoredObjects, _planted: StoredObjects) -> StoredObjects:
    """Give every file the content of the next one."""
    contents = list(victims.values())
    return dict(zip(victims, [*contents[1:], contents[0]], strict=True))


def plant(victims: StoredObjects, planted: StoredObjects) -> StoredObjects:
    """Give every file the content of one that the attacker had stored for a text of its own."""
    contents = list(planted.values())
    return {path: contents[number % len(contents)] for number, path in enumerate(victims)}


FORGERIES: dict[str, Callable[[StoredObjects, StoredObjects], StoredObjects]] = {
    "untouched": lambda victims, _planted: victims,
    "flipped": flip,
    "cut": cut,
    "swapped": swap,
    "planted": plant,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers to a prompt before and after its stored pages were forged."""

    forgery: str
    before: ProbeAnswer
    after: ProbeAnswer

    @property
    def is_accepted(self) -> bool:
        """Whether a forged page was used, or changed the answer."""
        return self.after.cached_tokens > 0 or self.after.text != self.before.text


async def probe_forgeries(scene: Scene) -> list[Finding]:
    """Alter, swap and plant the stored pages of one victim, as an attacker who can write to the storage.

    Victims' prompts are answered by one server, which stores their pages; the attacker changes what is stored; another
    server over the same storage, with nothing in memory, answers the same prompts. A forged page must be a miss, and
    answers must stay the same.
    """
    folder, sibling = scene.server.storage, scene.sibling
    if folder is None or sibling is None:
        return [not_applicable(FORGED, "no storage that can be written to, with a second server over it")]
    tokens = TEXT_PAGES * scene.texts.page_tokens + scene.texts.page_tokens // 2
    attacker = _text(scene, tokens)
    _, planted = await _stored(scene, folder, attacker, scene.user("attacker"))
    outcomes: list[Outcome] = []
    for name, forge in FORGERIES.items():
        text, victim = _text(scene, tokens), scene.user("victim")
        before, files = await _stored(scene, folder, text, victim)
        if not files or not planted:
            return [not_applicable(FORGED, f"nothing was stored within {PATIENCE_S:g} s")]
        for path, data in forge(files, planted).items():
            path.write_bytes(data)
        outcomes.append(Outcome(name, before, await sibling.complete(text, victim, ANSWER_TOKENS)))
    return [judge_forgeries(outcomes)]


def judge_forgeries(outcomes: list[Outcome]) -> Finding:
    """Derive the finding; the first outcome is that of untouched pages."""
    untouched, *forged = outcomes
    accepted = [outcome for outcome in forged if outcome.is_accepted]
    if accepted:
        shown = ", ".join(outcome.forgery for outcome in accepted)
        return Finding(FORGED, OracleVerdict.LEAKS, len(forged), note=f"pages are used: {shown}")
    if not untouched.after.cached_tokens:
        return Finding(
            FORGED, OracleVerdict.UNDECIDED, len(forged), note="pages that were not touched are not found either"
        )
    names = ", ".join(outcome.forgery for outcome in forged)
    note = f"misses: {names}; of untouched pages {untouched.after.cached_tokens} tokens are found"
    return Finding(FORGED, OracleVerdict.CLOSED, len(forged), note=note)


async def _stored(
    scene: Scene, folder: Path, text: tuple[Segment, ...], user: str
) -> tuple[ProbeAnswer, StoredObjects]:
    """Have a text answered; return the answer and the files that it left in the storage."""
    earlier = set(_files(folder))
    answer = await scene.prober.complete(text, user, ANSWER_TOKENS)
    clock = scene.prober.clock
    deadline, changed_at, count = clock.now() + PATIENCE_S, clock.now(), 0
    while clock.now() < deadline:
        await clock.sleep(POLL_S)
        new = [path for path in _files(folder) if path not in earlier]
        if len(new) != count:
            changed_at, count = clock.now(), len(new)
        elif count and clock.now() - changed_at >= QUIET_S:
            return answer, {path: path.read_bytes() for path in sorted(new)}
    return answer, {}


def _text(scene: Scene, tokens: int) -> tuple[Segment, ...]:
    return (Segment(f"document/{scene.name()}", tokens),)


def _files(folder: Path) -> list[Path]:
    """Return the objects of a storage directory; the keyring lies beside its folders."""
    return [path for path in folder.glob("*/*") if path.is_file() and not path.name.startswith(".")]
