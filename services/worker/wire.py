"""Wire messages of the worker, to and from dataclasses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidRequestError
from common.steps import (
    AdapterLoad,
    Draft,
    EngineSpec,
    JumpLimit,
    MicroBatch,
    PageGrants,
    PageReplacement,
    PrefillChunk,
    RowOpen,
    StateSave,
    StepPlan,
)
from common.transfers import PeerPages, Transfer, TransferDirection, TransferId
from common.types import AdapterSlot, EncoderOutputId, RequestId, RowImage, RowSlot, SnapshotSlot, StepId
from common.wire.answers import finish_reason_to_wire, logprob_to_wire, prompt_logprobs_from_wire, span_to_wire
from common.wire.images import pixels_from_wire
from common.wire.requests import pooling_from_wire, pooling_to_wire, sampling_from_wire, trace_from_wire
from protos.gen.pando.v1 import worker_pb2
from services.worker.engine.host_tier.shared_pages import SharedPages
from services.worker.peers.sealed_memory import SealedPlace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from common.steps import EngineCapacity, RecurrentStates, StepResult, WindowPool

DEFAULT_MEMORY_FRACTION = 0.85

_DIRECTIONS = {
    worker_pb2.TransferDirection.Value(f"TRANSFER_DIRECTION_{each.name}"): each for each in TransferDirection
}


def spec_from_wire(message: worker_pb2.ConfigureRequest) -> EngineSpec:
    """Decode a configuration of this rank.

    Raises:
        InvalidRequestError: a field that has no default is missing, or the rank or its group is outside its range.
    """
    world_size = message.world_size or 1
    if message.rank >= world_size:
        raise InvalidRequestError(f"rank {message.rank} of a group of {world_size}", param="rank")
    stages = message.pipeline_stages or 1
    if world_size % stages:
        raise InvalidRequestError(f"{world_size} ranks cannot be divided into {stages} stages", param="pipeline_stages")
    groups = message.data_parallel_size or 1
    if message.data_parallel_rank >= groups:
        raise InvalidRequestError(
            f"group {message.data_parallel_rank} of {groups} that share experts", param="data_parallel_rank"
        )
    for name in ("model", "page_size_tokens", "max_rows", "max_step_tokens"):
        if not getattr(message, name):
            raise InvalidRequestError(f"{name} must be set", param=name)
    return EngineSpec(
        model=message.model,
        load_format=message.load_format or "auto",
        dtype=message.dtype or "auto",
        kv_dtype=message.kv_dtype or "auto",
        rank=message.rank,
        world_size=world_size,
        rendezvous=message.rendezvous,
        page_size=message.page_size_tokens,
        max_rows=message.max_rows,
        max_context=message.max_context_tokens,
        max_step_tokens=message.max_step_tokens,
        device_pages=message.device_pages if message.HasField("device_pages") else None,
        memory_fraction=message.memory_fraction or DEFAULT_MEMORY_FRACTION,
        host_pages=message.host_pages if message.HasField("host_pages") else None,
        host_bytes=message.host_bytes,
        window_ratio=message.window_ratio,
        window_pages=message.window_pages if message.HasField("window_pages") else None,
        quantization=message.quantization or "auto",
        classifier_from_token=tuple(message.classifier_from_token),
        snapshots=message.snapshots if message.HasField("snapshots") else None,
        host_snapshots=message.host_snapshots if message.HasField("host_snapshots") else None,
        rope_parameters=message.rope_parameters,
        adapter_slots=message.adapter_slots,
        adapter_experts=message.adapter_experts,
        weight_version=message.weight_version,
        base_model=message.base_model,
        vision=message.vision,
        only_encodes=message.only_encodes,
        kept_embeddings=message.kept_embeddings,
        stages=stages,
        expert_parallel=message.expert_parallel,
        deterministic=message.deterministic,
        data_parallel_size=groups,
        data_parallel_rank=message.data_parallel_rank,
        data_parallel_rendezvous=message.data_parallel_rendezvous,
        chosen_device_pages=message.chosen_device_pages,
        chosen_host_pages=message.chosen_host_pages,
        reload_weights=message.reload_weights,
    )


def capacity_to_wire(capacity: EngineCapacity) -> worker_pb2.WorkerCapacity:
    """Encode the capacity of this rank."""
    return worker_pb2.WorkerCapacity(
        device_pages=capacity.device_pages,
        page_size_tokens=capacity.page_size,
        max_context_tokens=capacity.max_context,
        vocabulary_size=capacity.vocabulary_size,
        eos_token_ids=capacity.eos_token_ids,
        kv_bytes_per_token=capacity.kv_bytes_per_token,
        fingerprint=capacity.fingerprint,
        device=capacity.device,
        layers=capacity.layers,
        host_pages=capacity.host_pages,
        prefill_tokens_per_s=capacity.prefill_tokens_per_s,
        load_bytes_per_s=capacity.load_bytes_per_s,
        has_storage=capacity.has_storage,
        window_pool=_window_pool_to_wire(capacity.window_pool),
        recurrent_states=_states_to_wire(capacity.recurrent_states),
        is_encoder=capacity.is_encoder,
        jumps_forward=capacity.jumps_forward,
        verifies_drafts=capacity.verifies_drafts,
        abandons_passes=capacity.abandons_passes,
        head=pooling_to_wire(capacity.head),
        only_pools=capacity.only_pools,
        sees_images=capacity.sees_images,
        embedding_bytes=capacity.embedding_bytes,
        image_block_tokens=capacity.image_block,
        encoder_identity=capacity.encoder_identity,
        products=capacity.products,
        kv_identity=capacity.kv_identity,
    )


def _window_pool_to_wire(pool: WindowPool | None) -> worker_pb2.WindowPool | None:
    if pool is None:
        return None
    return worker_pb2.WindowPool(
        pages=pool.pages, window_tokens=pool.window_tokens, layers=pool.layers,
        kv_bytes_per_token=pool.kv_bytes_per_token,
    )  # fmt: skip


def _states_to_wire(states: RecurrentStates | None) -> worker_pb2.RecurrentStates | None:
    if states is None:
        return None
    return worker_pb2.RecurrentStates(
        snapshots=states.snapshots, row_bytes=states.row_bytes, host_snapshots=states.host_snapshots
    )


def plan_from_wire(message: worker_pb2.StepPlan) -> StepPlan:
    """Decode a plan; whether it fits the rows is the engine's to check.

    Raises:
        InvalidRequestError: a transfer's direction or a row's pooling is none that this worker knows.
    """
    return StepPlan(
        step_id=StepId(message.step_id),
        epoch=message.epoch,
        closes=tuple(RowSlot(row) for row in message.closes),
        opens=tuple(_open_from_wire(opened) for opened in message.opens),
        grants=_grants_from_wire(message.page_grants) if message.HasField("page_grants") else PageGrants(),
        prefills=tuple(PrefillChunk(RowSlot(chunk.row), chunk.start, chunk.length) for chunk in message.prefills),
        steps=message.steps,
        replacements=tuple(
            PageReplacement(
                RowSlot(replaced.row), replaced.first, _int32(replaced.pages), _int32(replaced.window_pages)
            )
            for replaced in message.replacements
        ),
        transfers=tuple(_transfer_from_wire(transfer) for transfer in message.transfers),
        jumps=tuple(JumpLimit(RowSlot(jump.row), jump.max_tokens) for jump in message.jumps),
        drafts=tuple(Draft(RowSlot(draft.row), np.array(draft.token_ids, np.int32)) for draft in message.drafts),
        saves=tuple(
            StateSave(RowSlot(save.row), save.tokens, SnapshotSlot(save.snapshot)) for save in message.state_saves
        ),
        adapters=tuple(AdapterLoad(AdapterSlot(load.slot), load.digest) for load in message.adapter_loads),
        can_abandon=message.can_abandon,
        can_shorten=message.can_shorten,
        micro_batch=MicroBatch(message.micro_batch, message.micro_batches or 1),
        dropped_outputs=tuple(map(EncoderOutputId, message.dropped_outputs)),
    )


def _grants_from_wire(message: worker_pb2.PageGrants) -> PageGrants:
    return PageGrants(_int32(message.rows), _int32(message.pages), _int32(message.window_pages))


def result_to_wire(result: StepResult) -> worker_pb2.StepResult:
    """Encode the result of one forward pass."""
    message = worker_pb2.StepResult(
        step_id=result.step_id,
        substep=result.substep,
        last=result.last,
        rows=result.rows.tolist(),
        token_ids=result.token_ids.tolist(),
        compute_us=result.compute_us,
        host_us=result.host_us,
        error=result.error,
        out_of_memory=result.out_of_memory,
        partial=result.partial,
        accepted_rows=result.accepted_rows.tolist(),
        accepted_token_ids=result.accepted_token_ids.tolist(),
        forced_rows=result.forced_rows.tolist(),
        forced_token_ids=result.forced_token_ids.tolist(),
        abandoned=result.abandoned,
    )
    for stop in result.stops:
        message.stops.add(
            row=stop.row, reason=finish_reason_to_wire(stop.reason), matched_token_id=stop.matched_token_id
        )
    for row, logprob in result.logprobs:
        message.logprobs.add(row=row, logprob=logprob_to_wire(logprob))
    for ack in result.acks:
        message.acks.add(
            transfer_id=ack.transfer_id,
            done_pages=ack.done_pages,
            duration_us=ack.duration_us,
            done_snapshots=ack.done_snapshots,
        )
    for row, embedding in result.embeddings:
        message.embeddings.add(row=row, embedding=embedding)
    for row, span in result.prompt_logprobs:
        message.prompt_logprobs.add(row=row, span=span_to_wire(span))
    return message


def _open_from_wire(message: worker_pb2.RowOpen) -> RowOpen:
    return RowOpen(
        row=RowSlot(message.row),
        request_id=RequestId(message.request_id),
        token_ids=_int32(message.token_ids),
        prompt_tokens=message.prompt_tokens,
        computed_tokens=message.computed_tokens,
        pages=_int32(message.pages),
        window_pages=_int32(message.window_pages),
        sampling=sampling_from_wire(message.sampling),
        max_total_tokens=message.max_total_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        min_new_tokens=message.min_new_tokens,
        postponed_token_ids=tuple(message.postponed_token_ids),
        pooling=pooling_from_wire(message.pooling),
        prompt_logprobs=prompt_logprobs_from_wire(message),
        second_text_start=message.second_text_start if message.HasField("second_text_start") else None,
        snapshot=SnapshotSlot(message.snapshot) if message.HasField("snapshot") else None,
        adapter=AdapterSlot(message.adapter_slot) if message.HasField("adapter_slot") else None,
        trace=trace_from_wire(message.trace),
        images=tuple(image_from_wire(image) for image in message.images),
    )


def image_from_wire(message: worker_pb2.RowImage) -> RowImage:
    """Decode an image of a row.

    Raises:
        InvalidRequestError: there are more or fewer pixels than their shape has.
    """
    has_pixels = message.HasField("pixels") or message.HasField("packed")
    pixels = pixels_from_wire(message) if has_pixels else None
    output = EncoderOutputId(message.output) if message.HasField("output") else None
    return RowImage(message.digest, message.offset, message.length, tuple(message.grid), pixels, output)


def _transfer_from_wire(message: worker_pb2.Transfer) -> Transfer:
    direction = _DIRECTIONS.get(message.direction)
    if direction is None:
        raise InvalidRequestError(f"transfer {message.transfer_id} has no direction that is known", param="direction")
    return Transfer(
        transfer_id=TransferId(message.transfer_id),
        direction=direction,
        device_pages=_int32(message.device_pages),
        host_pages=_int32(message.host_pages),
        object_keys=tuple(message.object_keys),
        cipher_key=message.cipher_key,
        peer=_peer_from_wire(message.peer) if message.HasField("peer") else None,
        device_snapshots=_int32(message.device_snapshots),
        host_snapshots=_int32(message.host_snapshots),
    )


def _peer_from_wire(message: worker_pb2.PeerPages) -> PeerPages:
    return PeerPages(
        tuple(message.workers), message.lease, _int32(message.device_pages), _int32(message.device_snapshots)
    )


def embeddings_to_wire(part: bytes | SealedPlace) -> worker_pb2.ReadEmbeddingsResponse:
    """Return the message for some bytes of embeddings, or for the memory where all of them are."""
    if isinstance(part, bytes):
        return worker_pb2.ReadEmbeddingsResponse(content=part)
    return worker_pb2.ReadEmbeddingsResponse(
        memory=worker_pb2.SealedPlace(name=part.name, process=part.process, descriptor=part.descriptor)
    )


def embeddings_from_wire(message: worker_pb2.ReadEmbeddingsResponse) -> bytes | SealedPlace:
    """Convert a message of `embeddings_to_wire` back."""
    if message.HasField("memory"):
        return SealedPlace(message.memory.name, message.memory.process, message.memory.descriptor)
    return message.content


def shared_pages_to_wire(memory: SharedPages) -> worker_pb2.SharedPages:
    """Return the message for memory with pages."""
    return worker_pb2.SharedPages(
        name=memory.name,
        pages=memory.pages,
        tensor_page_bytes=memory.tensor_page_bytes,
        allocations=memory.allocations,
        tensor_allocations=[allocation for allocation, _ in memory.tensors],
        tensor_offsets=[offset for _, offset in memory.tensors],
        over_nixl=memory.over_nixl,
    )


def shared_pages_from_wire(message: worker_pb2.SharedPages) -> SharedPages:
    """Convert a message of `shared_pages_to_wire` back.

    Raises:
        InvalidRequestError: a tensor is in no allocation.
    """
    last = max(message.tensor_allocations, default=0)
    if len(message.tensor_allocations) != len(message.tensor_offsets) or last >= len(message.allocations):
        raise InvalidRequestError("the tensors do not fit the allocations", param="tensor_allocations")
    return SharedPages(
        message.name,
        message.pages,
        message.tensor_page_bytes,
        tuple(message.allocations),
        tuple(zip(message.tensor_allocations, message.tensor_offsets, strict=True)),
        message.over_nixl,
    )


def _int32(values: Iterable[int]) -> NDArray[np.int32]:
    # Through uint32: values beyond int32, sent by a defective peer, turn negative, and the engine refuses them.
    return np.array(values, dtype=np.uint32).astype(np.int32)
