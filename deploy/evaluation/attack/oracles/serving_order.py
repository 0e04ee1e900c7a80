"""Order of service: who waits less, because the scheduler prefers what is cached (PromptPeek, NDSS 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, Group, judge, within
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from deploy.evaluation.attack.scene import Scene

# Long enough that everything after it is in the queue before any of it can start.
DUMMY_TOKENS = 192
# A head of one page, the slot, and a page of the rest: what a candidate costs must not hide what order it is served in.
CANDIDATE_PAGES = 3

Text = tuple[Segment, ...]


async def probe_order(scene: Scene) -> list[Finding]:
    """Queue candidates between dummies; half of their secrets are a victim's."""
    groups = [await _queue(scene) for _ in range(scene.effort.queues)]
    return [judge("serving order (PromptPeek)", within(groups), f"{scene.effort.candidates} candidates per queue")]


async def probe_duplicates(scene: Scene) -> list[Finding]:
    """Send texts while a victim's equal ones are on their way: does the server make one wait for the other?"""
    groups = [await _twins(scene) for _ in range(scene.effort.duplicate_batches)]
    return [judge("in-batch duplicates", within(groups), either_way=True)]


async def _queue(scene: Scene) -> Group:
    template, victim, attacker = scene.name(), scene.user("victim"), scene.user("attacker")
    tokens = CANDIDATE_PAGES * scene.texts.page_tokens
    texts = [scene.texts.filled(template, scene.name(), tokens) for _ in range(scene.effort.candidates)]
    held = set(scene.chance.sample(range(len(texts)), len(texts) // 2))
    await scene.prober.ask(scene.texts.filled(template, scene.name(), tokens), attacker)
    await scene.prober.ask_at_once([(texts[i], victim) for i in sorted(held)])
    order = scene.chance.sample(range(len(texts)), len(texts))
    queue = [_dummy(scene), *((texts[i], attacker) for i in order), _dummy(scene)]
    sightings = (await scene.prober.ask_at_once(queue))[1:-1]
    # Earlier is more.
    at = {i: -sighting.first_token_at for i, sighting in zip(order, sightings, strict=True)}
    return Group(tuple(at[i] for i in order if i in held), tuple(at[i] for i in order if i not in held))


async def _twins(scene: Scene) -> Group:
    victim, attacker = scene.user("victim"), scene.user("attacker")
    pairs = [(_document(scene), _document(scene)) for _ in range(scene.effort.duplicates)]
    attempts = [(text, number, place == 0) for number, pair in enumerate(pairs) for place, text in enumerate(pair)]
    scene.chance.shuffle(attempts)
    probes = ((text, attacker) for text, _, _ in attempts)
    queue = [_dummy(scene), *((held, victim) for held, _ in pairs), *probes]
    sightings = (await scene.prober.ask_at_once(queue))[1 + len(pairs) :]
    at = [(-sighting.first_token_at, is_held) for sighting, (_, _, is_held) in zip(sightings, attempts, strict=True)]
    return Group(tuple(time for time, is_held in at if is_held), tuple(time for time, is_held in at if not is_held))


def _document(scene: Scene) -> Text:
    return (Segment(f"twin/{scene.name()}", scene.texts.page_tokens),)


def _dummy(scene: Scene) -> tuple[Text, str]:
    return (Segment(f"dummy/{scene.name()}", DUMMY_TOKENS),), scene.user("dummy")
