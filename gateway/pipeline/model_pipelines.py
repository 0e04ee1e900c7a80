"""Combines the pipelines of several models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.requests import GenerateRequest
    from common.types import RequestId
    from gateway.pipeline.port import Listener, Pipeline


class ModelPipelines:
    """Implements `Pipeline`: each request goes to the pipeline of the model it names."""

    def __init__(self, pipelines: Mapping[str, Pipeline]) -> None:
        """`pipelines` maps model names, as the models' tokenizers report them, to pipelines."""
        self._pipelines = pipelines

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Send `request` to its model's pipeline; a resubmission goes to the same one."""
        self._pipelines[request.model].submit(request, listener)

    def abort(self, request_id: RequestId) -> None:
        """Abort the request in every pipeline: ids are globally unique, and a pipeline ignores unknown ids."""
        for pipeline in self._pipelines.values():
            pipeline.abort(request_id)
