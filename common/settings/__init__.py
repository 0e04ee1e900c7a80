"""The configuration schema of all services, one module per section, and the code that reads it."""

from __future__ import annotations

from common.settings.backend import BackendSettings
from common.settings.cache import CacheSettings
from common.settings.detokenizer import DetokenizerSettings
from common.settings.gateway import GatewaySettings
from common.settings.logs import LogSettings
from common.settings.model import ModelSettings, ServedModelSettings
from common.settings.queues import QueueSettings
from common.settings.rpc import RpcSettings
from common.settings.scheduler import SchedulerSettings
from common.settings.schema import PREFIX, Settings
from common.settings.sources import (
    CONFIG_VARIABLE,
    SettingsParser,
    check_environment,
    explain,
    load_settings,
    parse_settings,
)
from common.settings.storage import StorageSettings
from common.settings.tokenizer import TokenizerSettings
from common.settings.worker import WorkerSettings

__all__ = [
    "CONFIG_VARIABLE",
    "PREFIX",
    "BackendSettings",
    "CacheSettings",
    "DetokenizerSettings",
    "GatewaySettings",
    "LogSettings",
    "ModelSettings",
    "QueueSettings",
    "RpcSettings",
    "SchedulerSettings",
    "ServedModelSettings",
    "Settings",
    "SettingsParser",
    "StorageSettings",
    "TokenizerSettings",
    "WorkerSettings",
    "check_environment",
    "explain",
    "load_settings",
    "parse_settings",
]
