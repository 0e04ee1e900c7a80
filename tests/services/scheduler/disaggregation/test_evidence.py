"""A prefill group and two decode groups with one fleet state: what counts as evidence that a prompt is common."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from common.fleet.state import FleetState
from common.types import CacheMode
from tests.fakes.redis_process import temporary_redis
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID
from tests.services.scheduler.pipeline import Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from common.fleet.state import NamedEvidence, PromotionRules
    from common.transfers import PeerPages
    from tests.fakes.redis_process import RedisProcess
    from tests.fakes.simulated_worker import Content

SECRET = "a secret of forty characters, or of more"
PROMPT = [(13 * position) % 900 + 10 for position in range(62)]
WHOLE_PAGES = 15
SUBJECTS = 3


class Fleet:
    """The groups; `reported` has, for each group's connection to the state, the tags that it has sent."""

    def __init__(self, folder: Path, server: RedisProcess) -> None:
        self.reported: dict[int, set[bytes]] = {}
        self._server = server
        common: dict[str, Any] = {
            "fleet": {"state": server.url, "secret": SECRET},
            "prefill_min_tokens": 16,
            "host_tier": {"pages": 64},
            "cache": {
                "epoch_seconds": 1.0,
                "sharing_seconds": 0.2,
                "promotion_subjects": SUBJECTS,
                "promotion_epochs": 600,
            },
        }
        for name in ("prefill", "decode-0", "decode-1"):
            (folder / name).mkdir()
        self.prefill = Pipeline(folder / "prefill", role="prefill", **common)
        self.decodes = [Pipeline(folder / f"decode-{number}", role="decode", **common) for number in range(2)]
        for decode in self.decodes:
            for rank, worker in enumerate(decode.workers):
                worker.read_peer = partial(self._lend, rank)

    def _lend(self, rank: int, peer: PeerPages) -> list[Content]:
        return self.prefill.workers[rank].lend(peer)

    @property
    def pipelines(self) -> list[Pipeline]:
        return [self.prefill, *self.decodes]

    async def ask(self, user: str, decode: int, cache_mode: CacheMode = CacheMode.DEFAULT) -> int:
        """Have a decode group answer the prompt, and return how many of its tokens were cached."""
        group = self.decodes[decode]
        name = f"{user}-{decode}"
        prefill = self.prefill.address("scheduler")
        admission = await group.submit(
            name, PROMPT, prefill_group=prefill, user=user, max_tokens=4, cache_mode=cache_mode
        )
        assert not admission.HasField("rejected")
        await group.finished(name)
        assert group.detokenizer.output_of(name) == expected_output(PROMPT, len(PROMPT) + 4, (STOP_ID,))
        return group.detokenizer.cached[name]

    def subjects(self) -> int:
        """Return the number of subjects that count as evidence for the prompt's first page, by the state's server."""
        client = self._server.client()
        return max((client.zcard(key) for key in client.scan_iter("*:e:*")), default=0)

    async def have_reported(self, groups: int, tags: int) -> None:
        """Wait until so many groups have each reported evidence of so many subjects."""
        await until(lambda: sum(len(sent) >= tags for sent in self.reported.values()) >= groups)


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    with temporary_redis() as server:
        fleet = Fleet(tmp_path, server)
        add = FleetState.add_evidence

        async def recorded(state: FleetState, evidence: Sequence[NamedEvidence], rules: PromotionRules) -> None:
            await add(state, evidence, rules)
            # The shallowest prefix of each claim.
            fleet.reported.setdefault(id(state), set()).update(claim.prefixes[0][1] for claim in evidence)

        monkeypatch.setattr(FleetState, "add_evidence", recorded)
        for pipeline in fleet.pipelines:
            await pipeline.start()
            await pipeline.ready()
        yield fleet
        for pipeline in reversed(fleet.pipelines):
            await pipeline.stop()


async def test_a_request_that_passes_through_both_groups_is_evidence_of_one_subject(fleet: Fleet) -> None:
    assert await fleet.ask("alice", 0) == 0
    assert (await fleet.decodes[0].state()).disaggregation.fetched_pages == WHOLE_PAGES
    await fleet.have_reported(groups=2, tags=1)
    assert fleet.subjects() == 1
    # Wherever she asks again.
    await fleet.ask("alice", 1)
    await fleet.have_reported(groups=3, tags=1)
    assert fleet.subjects() == 1


async def test_subjects_that_ask_at_different_decode_groups_are_evidence_together(fleet: Fleet) -> None:
    for number, user in enumerate(("alice", "bob")):
        assert await fleet.ask(user, number) == 0
    # The group that prefills for both has both; each of the others has one.
    await fleet.have_reported(groups=1, tags=2)
    await fleet.have_reported(groups=3, tags=1)
    assert fleet.subjects() == 2
    # Two of three subjects are too few, so the prompt stays private.
    assert await fleet.ask("carol", 0) == 0
    await until(lambda: fleet.subjects() == SUBJECTS)
    for pipeline in fleet.pipelines:
        await until_state(pipeline, lambda state: state.cache_accounting.tenant_pages > 0)
    for decode in range(2):
        assert await fleet.ask("dave", decode) == 4 * WHOLE_PAGES


async def test_private_requests_are_evidence_in_neither_group(fleet: Fleet) -> None:
    for number in range(SUBJECTS):
        assert await fleet.ask(f"user-{number}", number % 2, cache_mode=CacheMode.PRIVATE) == 0
    await fleet.ask("alice", 0)
    await fleet.have_reported(groups=2, tags=1)
    assert fleet.subjects() == 1
