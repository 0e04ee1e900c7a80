"""The messages exchanged with workers: configuration, plans and results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_IDS, EngineCapacity, RecurrentStates, RowStop, StepResult, WindowPool
from common.transfers import TransferAck, TransferDirection, TransferId
from common.types import RowSlot, StepId
from common.wire.answers import finish_reason_from_wire, logprob_from_wire, prompt_logprobs_to_wire, span_from_wire
from common.wire.images import pixels_to_wire
from common.wire.requests import pooling_from_wire, pooling_to_wire, sampling_to_wire, trace_to_wire
from protos.gen.pando.v1 import worker_pb2

if TYPE_CHECKING:
    from common.steps import EngineSpec, RowOpen, StepPlan
    from common.transfers import PeerPages, Transfer
    from common.types import RowImage

_DIRECTIONS = {
    each: worker_pb2.TransferDirection.Value(f"TRANSFER_DIRECTION_{each.name}") for each in TransferDirection
}


def spec_to_wire(spec: EngineSpec) -> worker_pb2.ConfigureRequest:
    """Encode the configuration of a rank."""
    return worker_pb2.ConfigureRequest(
        model=spec.model,
        load_format=spec.load_format,
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        rank=spec.rank,
        world_size=spec.world_size,
        rendezvous=spec.rendezvous,
        page_size_tokens=spec.page_size,
        max_rows=spec.max_rows,
        max_context_tokens=spec.max_context,
        max_step_tokens=spec.max_step_tokens,
        device_pages=spec.device_pages,
        memory_fraction=spec.memory_fraction,
        host_pages=spec.host_pages,
        host_bytes=spec.host_bytes,
        window_ratio=spec.window_ratio,
        window_pages=spec.window_pages,
        quantization=spec.quantization,
        classifier_from_token=spec.classifier_from_token,
        snapshots=spec.snapshots,
        host_snapshots=spec.host_snapshots,
        rope_parameters=spec.rope_parameters,
        adapter_slots=spec.adapter_slots,
        adapter_experts=spec.adapter_experts,
        weight_version=spec.weight_version,
        base_model=spec.base_model,
        vision=spec.vision,
        only_encodes=spec.only_encodes,
        pipeline_stages=spec.stages,
        expert_parallel=spec.expert_parallel,
        kept_embeddings=spec.kept_embeddings,
        deterministic=spec.deterministic,
        data_parallel_size=spec.data_parallel_size,
        data_parallel_rank=spec.data_parallel_rank,
        data_parallel_rendezvous=spec.data_parallel_rendezvous,
        chosen_device_pages=spec.chosen_device_pages,
        chosen_host_pages=spec.chosen_host_pages,
        reload_weights=spec.reload_weights,
    )


def capacity_from_wire(message: worker_pb2.WorkerCapacity) -> EngineCapacity:
    """Decode the capacity of a configured rank."""
    return EngineCapacity(
        device_pages=message.device_pages,
        page_size=message.page_size_tokens,
        max_context=message.max_context_tokens,
        vocabulary_size=message.vocabulary_size,
        eos_token_ids=tuple(message.eos_token_ids),
        kv_bytes_per_token=message.kv_bytes_per_token,
        fingerprint=message.fingerprint,
        device=message.device,
        layers=message.layers,
        host_pages=message.host_pages,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        load_bytes_per_s=message.load_bytes_per_s,
        has_storage=message.has_storage,
        window_pool=_window_pool_from_wire(message.window_pool) if message.HasField("window_pool") else None,
        recurrent_states=_states_from_wire(message.recurrent_states) if message.HasField("recurrent_states") else None,
        is_encoder=message.is_encoder,
        jumps_forward=message.jumps_forward,
        verifies_drafts=message.verifies_drafts,
        abandons_passes=message.abandons_passes,
        head=pooling_from_wire(message.head),
        only_pools=message.only_pools,
        sees_images=message.sees_images,
        embedding_bytes=message.embedding_bytes,
        image_block=message.image_block_tokens,
        encoder_identity=message.encoder_identity,
        products=message.products,
        kv_identity=message.kv_identity,
    )


def _window_pool_from_wire(message: worker_pb2.WindowPool) -> WindowPool:
    return WindowPool(message.pages, message.window_tokens, message.layers, message.kv_bytes_per_token)


def _states_from_wire(message: worker_pb2.RecurrentStates) -> RecurrentStates:
    return RecurrentStates(message.snapshots, message.row_bytes, message.host_snapshots)


def plan_to_wire(plan: StepPlan) -> worker_pb2.StepPlan:
    """Encode a plan; every rank receives the same message."""
    message = worker_pb2.StepPlan(
        step_id=plan.step_id, epoch=plan.epoch, closes=plan.closes, steps=plan.steps, can_abandon=plan.can_abandon,
        can_shorten=plan.can_shorten, micro_batch=plan.micro_batch.index, micro_batches=plan.micro_batch.count,
        dropped_outputs=plan.dropped_outputs,
    )  # fmt: skip
    for opened in plan.opens:
        _add_open(opened, message)
    grants = plan.grants
    if grants.rows.size:
        message.page_grants.rows.extend(grants.rows.tolist())
        message.page_grants.pages.extend(grants.pages.tolist())
        message.page_grants.window_pages.extend(grants.window_pages.tolist())
    for chunk in plan.prefills:
        message.prefills.add(row=chunk.row, start=chunk.start, length=chunk.length)
    for replacement in plan.replacements:
        message.replacements.add(
            row=replacement.row, first=replacement.first, pages=replacement.pages.tolist(),
            window_pages=replacement.window_pages.tolist(),
        )  # fmt: skip
    message.transfers.extend(_transfer_to_wire(transfer) for transfer in plan.transfers)
    for jump in plan.jumps:
        message.jumps.add(row=jump.row, max_tokens=jump.max_tokens)
    for draft in plan.drafts:
        message.drafts.add(row=draft.row, token_ids=draft.token_ids.tolist())
    for save in plan.saves:
        message.state_saves.add(row=save.row, tokens=save.tokens, snapshot=save.snapshot)
    for load in plan.adapters:
        message.adapter_loads.add(slot=load.slot, digest=load.digest)
    return message


def _transfer_to_wire(transfer: Transfer) -> worker_pb2.Transfer:
    return worker_pb2.Transfer(
        transfer_id=transfer.transfer_id,
        direction=_DIRECTIONS[transfer.direction],
        device_pages=transfer.device_pages.tolist(),
        host_pages=transfer.host_pages.tolist(),
        object_keys=transfer.object_keys,
        cipher_key=transfer.cipher_key,
        peer=None if transfer.peer is None else _peer_to_wire(transfer.peer),
        device_snapshots=transfer.device_snapshots.tolist(),
        host_snapshots=transfer.host_snapshots.tolist(),
    )


def _peer_to_wire(peer: PeerPages) -> worker_pb2.PeerPages:
    return worker_pb2.PeerPages(
        workers=peer.workers,
        lease=peer.lease,
        device_pages=peer.device_pages.tolist(),
        device_snapshots=peer.device_snapshots.tolist(),
    )


def _add_open(opened: RowOpen, plan: worker_pb2.StepPlan) -> None:
    message = plan.opens.add(
        row=opened.row,
        request_id=opened.request_id,
        token_ids=opened.token_ids.view(np.uint32).tolist(),
        prompt_tokens=opened.prompt_tokens,
        computed_tokens=opened.computed_tokens,
        pages=opened.pages.tolist(),
        window_pages=opened.window_pages.tolist(),
        sampling=sampling_to_wire(opened.sampling),
        max_total_tokens=opened.max_total_tokens,
        stop_token_ids=opened.stop_token_ids,
        min_new_tokens=opened.min_new_tokens,
        postponed_token_ids=opened.postponed_token_ids,
        pooling=pooling_to_wire(opened.pooling),
        prompt_logprobs=prompt_logprobs_to_wire(opened.prompt_logprobs),
        second_text_start=opened.second_text_start,
        snapshot=opened.snapshot,
        adapter_slot=opened.adapter,
        trace=trace_to_wire(opened.trace),
    )
    for image in opened.images:
        write_image(image, message.images.add())


def write_image(image: RowImage, message: worker_pb2.RowImage) -> None:
    """Write an image of a row into an empty message; see `pixels_to_wire`."""
    message.digest, message.offset, message.length = image.digest, image.offset, image.length
    message.grid.extend(image.grid)
    if image.output is not None:
        message.output = image.output
    if image.pixels is not None:
        pixels_to_wire(image.pixels, message)


def result_from_wire(message: worker_pb2.StepResult) -> StepResult:
    """Decode the result of one forward pass."""
    return StepResult(
        step_id=StepId(message.step_id),
        substep=message.substep,
        last=message.last,
        rows=np.array(message.rows, dtype=np.int32),
        token_ids=np.array(message.token_ids, dtype=np.int32),
        stops=tuple(
            RowStop(
                RowSlot(stop.row),
                finish_reason_from_wire(stop.reason),
                stop.matched_token_id if stop.HasField("matched_token_id") else None,
            )
            for stop in message.stops
        ),
        logprobs=tuple((RowSlot(entry.row), logprob_from_wire(entry.logprob)) for entry in message.logprobs),
        compute_us=message.compute_us,
        host_us=message.host_us,
        error=message.error if message.HasField("error") else None,
        out_of_memory=message.out_of_memory,
        acks=tuple(
            TransferAck(TransferId(ack.transfer_id), ack.done_pages, ack.duration_us, ack.done_snapshots)
            for ack in message.acks
        ),
        prompt_logprobs=tuple((RowSlot(entry.row), span_from_wire(entry.span)) for entry in message.prompt_logprobs),
        partial=message.partial,
        embeddings=tuple((RowSlot(entry.row), entry.embedding) for entry in message.embeddings),
        accepted_rows=np.array(message.accepted_rows, dtype=np.int32) if message.accepted_rows else NO_IDS,
        accepted_token_ids=np.array(message.accepted_token_ids, dtype=np.int32) if message.accepted_rows else NO_IDS,
        forced_rows=np.array(message.forced_rows, dtype=np.int32) if message.forced_rows else NO_IDS,
        forced_token_ids=np.array(message.forced_token_ids, dtype=np.int32) if message.forced_rows else NO_IDS,
        abandoned=message.abandoned,
    )
