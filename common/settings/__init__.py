"""The configuration schema of all services, one module per section, and the code that reads it."""

from __future__ import annotations

from common.settings.gateway import (
    BackendSettings,
    BatchesSettings,
    ConsoleSettings,
    GatewaySettings,
    ImagesSettings,
    JwtSettings,
    TlsSettings,
)
from common.settings.model import ModelSettings, ServedModelSettings
from common.settings.scheduler import (
    AdapterSettings,
    CacheSettings,
    HostTierSettings,
    QueueSettings,
    SchedulerSettings,
    SessionSettings,
    SpeculationSettings,
    StorageSettings,
)
from common.settings.schema import PREFIX, Settings
from common.settings.shared import (
    AuditSettings,
    FleetSettings,
    LimitsSettings,
    LogSettings,
    MetricsSettings,
    RpcSettings,
    TracingSettings,
)
from common.settings.sources import (
    CONFIG_VARIABLE,
    SettingsParser,
    check_environment,
    explain,
    load_settings,
    parse_settings,
)
from common.settings.tokenizer import DetokenizerSettings, TokenizerSettings
from common.settings.worker import GrammarSettings, ProfileSettings, WorkerSettings, WorkerStorageSettings

__all__ = [
    "CONFIG_VARIABLE",
    "PREFIX",
    "AdapterSettings",
    "AuditSettings",
    "BackendSettings",
    "BatchesSettings",
    "CacheSettings",
    "ConsoleSettings",
    "DetokenizerSettings",
    "FleetSettings",
    "GatewaySettings",
    "GrammarSettings",
    "HostTierSettings",
    "ImagesSettings",
    "JwtSettings",
    "LimitsSettings",
    "LogSettings",
    "MetricsSettings",
    "ModelSettings",
    "ProfileSettings",
    "QueueSettings",
    "RpcSettings",
    "SchedulerSettings",
    "ServedModelSettings",
    "SessionSettings",
    "Settings",
    "SettingsParser",
    "SpeculationSettings",
    "StorageSettings",
    "TlsSettings",
    "TokenizerSettings",
    "TracingSettings",
    "WorkerSettings",
    "WorkerStorageSettings",
    "check_environment",
    "explain",
    "load_settings",
    "parse_settings",
]
