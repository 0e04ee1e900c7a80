"""The configuration schema of all services."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.settings.gateway import GatewaySettings
from common.settings.model import ModelSettings, ServedModelSettings
from common.settings.scheduler import SchedulerSettings
from common.settings.shared import (
    AuditSettings,
    FleetSettings,
    LimitsSettings,
    LogSettings,
    MetricsSettings,
    RpcSettings,
    TracingSettings,
)
from common.settings.tokenizer import DetokenizerSettings, TokenizerSettings
from common.settings.worker import WorkerSettings

PREFIX = "PANDO_"


class Settings(BaseSettings):
    """All settings; each service reads its own section, and those that come before `gateway`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    model: ModelSettings = ModelSettings()
    models: dict[str, ServedModelSettings] = Field(default_factory=dict)
    """Several models for `pando up`, by the names that clients use: each is a reference, or a table with settings that
    differ from those that all models share. Absent: only `model`."""
    log: LogSettings = LogSettings()
    rpc: RpcSettings = RpcSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    limits: LimitsSettings = LimitsSettings()
    audit: AuditSettings = AuditSettings()
    fleet: FleetSettings = FleetSettings()
    gateway: GatewaySettings = GatewaySettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    worker: WorkerSettings = WorkerSettings()
    detokenizer: DetokenizerSettings = DetokenizerSettings()
