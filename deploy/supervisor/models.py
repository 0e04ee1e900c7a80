"""The models of one deployment, each with the settings of its own services."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from common import models
from common.chat_template import read_chat_template
from common.errors import ConfigurationError, InvalidRequestError
from common.names import check_name
from common.section import Section
from common.settings import ModelSettings, ServedModelSettings, explain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from common.models.progress import DownloadReport
    from common.settings import GatewaySettings, Settings

SECTIONS = ("tokenizer", "scheduler", "worker", "detokenizer")
MAX_PREFIX_CHARACTERS = 24
S = TypeVar("S", bound=Section)
M = TypeVar("M", bound=ModelSettings)


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """One model: its name for clients, the prefix of its services' names, and their settings."""

    name: str
    prefix: str
    settings: Settings
    ranks: int
    aliases: tuple[str, ...] = ()


def deploy_models(settings: Settings, ranks: int) -> list[DeployedModel]:
    """Return the models of `settings.models`, or the single model with `ranks` workers in each stage.

    Several models are assigned consecutive GPUs, unless their settings select some, or they take turns on one.

    Raises:
        ConfigurationError: a model's name or its own settings are invalid.
    """
    if not settings.models:
        return [DeployedModel(settings.model.name, "", settings, ranks * settings.scheduler.pipeline_parallel)]
    if ranks != 1:
        raise ConfigurationError("with several models, set tp for each model instead of --tp")
    deployed: list[DeployedModel] = []
    device = settings.worker.device_index
    for name, entry in settings.models.items():
        _check_name(name)
        prefix = _prefix(name, {model.prefix for model in deployed})
        own = _settings_of(settings, name, entry, device)
        its_ranks = entry.tp * own.scheduler.pipeline_parallel
        deployed.append(DeployedModel(name, prefix, own, its_ranks, entry.aliases))
        if not settings.scheduler.device_turns.enabled:
            device += its_ranks
    return deployed


def pin_models(settings: Settings, ranks: int, report: DownloadReport) -> Settings:
    """Download the models of a deployment; return `settings` with each model on a hub at its present commit.

    All services, and their restarts, then use the same files, which they find in the cache without a network, and the
    text that model.chat_template has now.

    Raises:
        ConfigurationError: a model or a chat template cannot be found, or a model not downloaded.
    """
    pinned: dict[str, str] = {}
    for model in deploy_models(settings, ranks):
        its = model.settings.model
        if its.load_format != "fake":
            pinned[its.reference] = models.pin(its.reference, report, weights=its.load_format != "dummy")

    def at_present(section: M) -> M:
        reference = pinned.get(section.reference, section.reference)
        changed = {} if reference == section.reference else {"reference": reference}
        if section.chat_template:
            changed["chat_template"] = read_chat_template(section.chat_template)
        return section.model_copy(update=changed) if changed else section

    entries = {name: at_present(entry) for name, entry in settings.models.items()}
    return settings.model_copy(update={"model": at_present(settings.model), "models": entries})


def check_metrics_ports(gateway: GatewaySettings, settings: Iterable[Settings]) -> None:
    """Raise ConfigurationError if two services would listen on the same port."""
    taken = {gateway.port}
    if gateway.metrics_port:
        if gateway.metrics_port in taken:
            raise ConfigurationError(f"gateway.port and gateway.metrics_port are both {gateway.port}")
        taken.add(gateway.metrics_port)
    for each in settings:
        for section in SECTIONS:
            port = getattr(each, section).metrics_port
            if port and port in taken:
                raise ConfigurationError(
                    f"two services would listen on port {port}: give each model its own {section}.metrics_port, or 0"
                )
            taken.add(port)


def _settings_of(settings: Settings, name: str, entry: ServedModelSettings, device_index: int) -> Settings:
    own = {field: getattr(entry, field) for field in entry.model_fields_set if field in ModelSettings.model_fields}
    update: dict[str, Section | dict[str, ServedModelSettings]] = {
        "models": {},
        "model": settings.model.model_copy(update={**own, "served_name": name}),
    }
    for section in SECTIONS:
        shared = getattr(settings, section)
        if section == "worker":
            shared = shared.model_copy(update={"device_index": device_index})
        update[section] = _with(shared, getattr(entry, section), name, section)
    return settings.model_copy(update=update)


def _with(shared: S, own: Mapping[str, Any], model: str, section: str) -> S:  # Any: checked here
    try:
        return type(shared).model_validate(_merged(shared.model_dump(), own))
    except ValidationError as error:
        raise ConfigurationError(f"models.{model}.{section}: {explain(error, section)}") from error


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `shared` with the values of `own`, section by section."""
    nested = {name: _merged(shared[name], value) for name, value in own.items() if _are_tables(shared.get(name), value)}
    return {**shared, **own, **nested}


def _are_tables(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def _check_name(name: str) -> None:
    try:
        check_name("models", name)
    except InvalidRequestError as error:
        raise ConfigurationError(error.message) from error


def _prefix(name: str, taken: set[str]) -> str:
    """Return a prefix for the names of a model's sockets and services that is not in `taken`."""
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:MAX_PREFIX_CHARACTERS].strip("-.") or "model"
    candidates = (f"{short}/", *(f"{short}-{number}/" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)
