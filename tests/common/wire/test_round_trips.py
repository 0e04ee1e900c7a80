from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.types import CacheMode, GroupRole, LoadReport, RequestOptions, RoleSignals, RoleWish
from common.wire.answers import (
    admission_from_wire,
    admission_to_wire,
    divided,
    failure_from_wire,
    finish_from_wire,
    finish_to_wire,
    logprob_from_wire,
    logprob_to_wire,
)
from common.wire.identity import find_from_wire, find_to_wire, view_from_wire, view_to_wire
from common.wire.requests import (
    load_from_wire,
    load_to_wire,
    options_from_wire,
    options_to_wire,
    pooling_from_wire,
    sampling_from_wire,
    sampling_to_wire,
    schedule_request_from_wire,
    schedule_request_to_wire,
    stop_from_wire,
    stop_to_wire,
    wish_from_wire,
    wish_to_wire,
)
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, sessions_pb2
from tests.common import strategies
from tests.common.strategies import plain
from tests.examples import examples

if TYPE_CHECKING:
    from common.types import Admission, Finish, SamplingParams, ScheduleRequest, StopConditions, TokenLogprob, View


def reparsed(message: scheduler_pb2.ScheduleRequest) -> scheduler_pb2.ScheduleRequest:
    return scheduler_pb2.ScheduleRequest.FromString(message.SerializeToString())


@examples(40)
@given(strategies.schedule_requests)
def test_a_request_survives_the_wire(request: ScheduleRequest) -> None:
    back = schedule_request_from_wire(reparsed(schedule_request_to_wire(request)))
    assert plain(back) == plain(request)


@given(strategies.sampling)
def test_sampling_survives_the_wire(sampling: SamplingParams) -> None:
    assert plain(sampling_from_wire(sampling_to_wire(sampling))) == plain(sampling)


@given(strategies.stops)
def test_stop_conditions_survive_the_wire(stop: StopConditions) -> None:
    assert plain(stop_from_wire(stop_to_wire(stop))) == plain(stop)


@given(strategies.finishes)
def test_a_finish_survives_the_wire(finish: Finish) -> None:
    encoded = finish_to_wire(finish).SerializeToString()
    assert finish_from_wire(common_pb2.Finish.FromString(encoded)) == finish


@given(strategies.logprobs)
def test_logprobs_survive_the_wire(logprob: TokenLogprob) -> None:
    assert plain(logprob_from_wire(logprob_to_wire(logprob))) == plain(logprob)


@given(strategies.admissions)
def test_an_admission_survives_the_wire(admission: Admission) -> None:
    encoded = admission_to_wire(admission).SerializeToString()
    assert admission_from_wire(common_pb2.Admission.FromString(encoded)) == admission


@given(strategies.views)
def test_a_view_survives_the_wire(view: View) -> None:
    assert plain(view_from_wire(view_to_wire(view))) == plain(view)


@pytest.mark.parametrize("parts", [{}, {"tenant": "t"}, {"name": "u"}, {"tenant": "", "name": ""}])
def test_a_view_without_tenant_or_name_is_refused(parts: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match="tenant and name"):
        view_from_wire(common_pb2.View(subject=common_pb2.Subject(**parts), salt="salt"))


def test_an_unknown_way_of_pooling_is_refused_and_not_taken_for_generating() -> None:
    assert pooling_from_wire(common_pb2.POOLING_UNSPECIFIED) is None
    with pytest.raises(InvalidRequestError, match="not supported"):
        pooling_from_wire(99)  # type: ignore[arg-type]  # as a newer peer would send it


def test_unset_sampling_fields_mean_greedy_without_filters_or_penalties() -> None:
    sampling = sampling_from_wire(common_pb2.SamplingParams())
    assert sampling.temperature == 0.0
    assert sampling.top_p == 1.0
    assert not sampling.has_penalties


def test_every_error_code_has_a_wire_value() -> None:
    values = set(common_pb2.ErrorCode.values()) - {common_pb2.ERROR_CODE_UNSPECIFIED}
    assert {failure_from_wire(common_pb2.RequestError(code=value)).code.name for value in values} == {
        common_pb2.ErrorCode.Name(value).removeprefix("ERROR_CODE_") for value in values
    }


@pytest.mark.parametrize("mode", CacheMode)
def test_cache_modes_survive_the_wire(mode: CacheMode) -> None:
    message = options_to_wire(RequestOptions(cache_mode=mode), scheduler_pb2.ScheduleRequest)
    assert options_from_wire(message).cache_mode is mode


@given(st.lists(strategies.admissions, max_size=6))
def test_many_admissions_are_divided_among_messages_in_their_order(many: list[Admission]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.wire.answers.MAX_MESSAGE_IDS", 4)
        parts = list(divided(many))
    assert [admission for part in parts for admission in part] == many
    assert len(parts) > 0
    for part in parts:
        ids = sum(len(admission.prompt_ids) + len(admission.conversation_ids) for admission in part)
        assert ids <= 4 or len(part) == 1


signals = st.builds(
    RoleSignals,
    may_change=st.booleans(),
    is_changing=st.booleans(),
    # In steps of 250 ms.
    waited_s=st.integers(0, 4000).map(lambda quarters: quarters / 4),
    fullness=st.floats(0, 1),
    own_role=st.sampled_from(GroupRole),
    follows_load=st.booleans(),
)
loads = st.builds(
    LoadReport,
    open_choices=st.integers(0, 2**31),
    serves=st.booleans(),
    sleeps=st.booleans(),
    role=st.sampled_from(GroupRole),
    free_tokens=st.none() | st.integers(0, 2**40),
    signals=st.none() | signals,
)


@given(loads)
def test_a_load_survives_the_wire(load: LoadReport) -> None:
    assert load_from_wire(scheduler_pb2.SchedulerLoad.FromString(load_to_wire(load).SerializeToString())) == load


@given(st.builds(RoleWish, role=st.sampled_from(GroupRole), reason=st.text(max_size=50)))
def test_a_wish_for_a_role_survives_the_wire(wish: RoleWish) -> None:
    assert wish_from_wire(scheduler_pb2.RoleWish.FromString(wish_to_wire(wish).SerializeToString())) == wish


@given(strategies.views, strategies.NAMES, st.none() | strategies.NAMES)
def test_the_question_for_a_session_survives_the_wire(view: View, session: str, after: str | None) -> None:
    message = sessions_pb2.FindSessionRequest.FromString(find_to_wire(view, session, after).SerializeToString())
    assert find_from_wire(message) == (view, session, after)
