"""Old names of settings. They are accepted for one version, with a warning, and refused by the next one.

`OldNames` translates each source (arguments, environment, tables of a file or of JSON) before it is read, so that the
precedence of the sources stays the same under either name.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROFILE = "it is a constant of PrivacyProfile (docs/privacy.md)"
CONSTANT = "it is a constant"

# Old name: new name. Names of one section stay in it, so that `models.NAME.SECTION` tables are translated alike.
RENAMED = {
    "gateway.certificate": "gateway.tls.certificate",
    "gateway.client_authority": "gateway.tls.client_authority",
    "gateway.jwt_admin_scope": "gateway.jwt.admin_scope",
    "gateway.jwt_algorithms": "gateway.jwt.algorithms",
    "gateway.jwt_audience": "gateway.jwt.audience",
    "gateway.jwt_issuer": "gateway.jwt.issuer",
    "gateway.jwt_keys": "gateway.jwt.keys",
    "gateway.jwt_tenant_claim": "gateway.jwt.tenant_claim",
    "gateway.jwt_user_claim": "gateway.jwt.user_claim",
    "gateway.key": "gateway.tls.key",
    "gateway.responses_file": "gateway.responses.file",
    "gateway.responses_lifetime_days": "gateway.responses.lifetime_days",
    "gateway.responses_max_bytes": "gateway.responses.max_bytes",
    "gateway.resume_attempts": "gateway.resume.attempts",
    "gateway.resume_deadline_s": "gateway.resume.deadline_s",
    "gateway.state": "gateway.state.url",
    "gateway.state_failure": "gateway.state.failure",
    "gateway.state_file": "gateway.state.url_file",
    "gateway.state_prefix": "gateway.state.prefix",
    "gateway.state_secret": "gateway.state.secret",
    "gateway.state_secret_file": "gateway.state.secret_file",
    "scheduler.cache": "scheduler.cache.mode",
    "scheduler.cache_checked_paths": "scheduler.cache.checked_paths",
    "scheduler.cache_content_check": "scheduler.content_check.enabled",
    "scheduler.cache_decision_log": "scheduler.cache.decision_log",
    "scheduler.cache_eviction": "scheduler.cache.eviction",
    "scheduler.cache_floor_share": "scheduler.cache.floor_share",
    "scheduler.cache_host_gigabytes": "scheduler.host_tier.gigabytes",
    "scheduler.cache_host_pages": "scheduler.host_tier.pages",
    "scheduler.cache_host_policy": "scheduler.host_tier.write_policy",
    "scheduler.cache_promotion_epochs": "scheduler.cache.promotion_epochs",
    "scheduler.cache_promotion_subjects": "scheduler.cache.promotion_subjects",
    "scheduler.cache_quota_share": "scheduler.cache.quota_share",
    "scheduler.cache_share_across_tenants": "scheduler.cache.share_across_tenants",
    "scheduler.cache_strict_numerics": "scheduler.cache.strict_numerics",
    "scheduler.cache_tenant_floor_share": "scheduler.cache.tenant_floor_share",
    "scheduler.content_deadline_s": "scheduler.content_check.deadline_s",
    "scheduler.content_detectors": "scheduler.content_check.detectors",
    "scheduler.content_rules": "scheduler.content_check.rules",
    "scheduler.epoch_seconds": "scheduler.cache.epoch_seconds",
    "scheduler.fair_output_weight": "scheduler.queue.fair_output_weight",
    "scheduler.lease_ms": "scheduler.target_plan_ms",
    "scheduler.max_lease_steps": "scheduler.max_steps_per_plan",
    "scheduler.max_waiting_requests": "scheduler.queue.max_waiting_requests",
    "scheduler.policy": "scheduler.queue.policy",
    "scheduler.priority_preemptions": "scheduler.queue.priority_preemptions",
    "scheduler.queue_depth": "scheduler.plans_in_flight",
    "scheduler.session_limit": "scheduler.sessions.limit",
    "scheduler.session_limit_total": "scheduler.sessions.limit_total",
    "scheduler.session_share": "scheduler.sessions.share",
    "scheduler.session_share_total": "scheduler.sessions.share_total",
    "scheduler.session_timeout_limit_s": "scheduler.sessions.timeout_limit_s",
    "scheduler.session_timeout_s": "scheduler.sessions.timeout_s",
    "scheduler.storage_keyring": "scheduler.storage.keyring",
    "scheduler.storage_megabytes_per_s": "scheduler.storage.megabytes_per_s",
    "scheduler.storage_min_tokens": "scheduler.storage.min_tokens",
    "scheduler.storage_prefetch": "scheduler.storage.prefetch",
    "scheduler.storage_secret": "scheduler.storage.secret",
    "scheduler.storage_wait_ms": "scheduler.storage.wait_ms",
    "scheduler.storage_write": "scheduler.storage.write",
    "tokenizer.routing": "tokenizer.routing.policy",
    "tokenizer.routing_prefix_tokens": "tokenizer.routing.prefix_tokens",
    "worker.grammar_cache_megabytes": "worker.grammars.cache_megabytes",
    "worker.grammar_open_per_subject": "worker.grammars.open_per_subject",
    "worker.grammar_seconds_per_minute": "worker.grammars.seconds_per_minute",
    "worker.grammar_slice_s": "worker.grammars.slice_s",
    "worker.grammar_timeout_s": "worker.grammars.timeout_s",
    "worker.profile_directory": "worker.profile.directory",
    "worker.profile_max_seconds": "worker.profile.max_seconds",
    "worker.storage": "worker.storage.location",
    "worker.storage_gigabytes": "worker.storage.gigabytes",
    "worker.storage_timeout_s": "worker.storage.timeout_s",
}

# Old name: why it is no setting any more. Its value has no effect.
REMOVED = {
    "gateway.jwt_cache_s": CONSTANT,
    "gateway.state_timeout_s": CONSTANT,
    "scheduler.cache_active_epochs": PROFILE,
    "scheduler.cache_continuation_limit": PROFILE,
    "scheduler.cache_creators_limit": PROFILE,
    "scheduler.cache_demotion_quarantines": PROFILE,
    "scheduler.cache_demotion_tenants": PROFILE,
    "scheduler.cache_diversity_min": PROFILE,
    "scheduler.cache_few_creators": PROFILE,
    "scheduler.cache_headroom_share": CONSTANT,
    "scheduler.cache_hit_min": PROFILE,
    "scheduler.cache_host_reserve_share": CONSTANT,
    "scheduler.cache_host_uses": CONSTANT,
    "scheduler.cache_host_window_pages": CONSTANT,
    "scheduler.cache_jump_factor": PROFILE,
    "scheduler.cache_merge_group_limit": CONSTANT,
    "scheduler.cache_public_bonus_epochs": CONSTANT,
    "scheduler.cache_quarantine_epochs": PROFILE,
    "scheduler.cache_remembered_chains": PROFILE,
    "scheduler.cache_repromotion_factor": PROFILE,
    "scheduler.cache_verdict_epochs": PROFILE,
    "scheduler.cache_watched_pairs": PROFILE,
    "scheduler.fair_slack_tokens": CONSTANT,
    "scheduler.session_limit_tenant": "it is three quarters of scheduler.sessions.limit_total",
    "scheduler.session_share_tenant": "it is three quarters of scheduler.sessions.share_total",
    "scheduler.storage_pages_in_flight": CONSTANT,
    "tokenizer.routing_load_factor": CONSTANT,
    "worker.fake_eos_probability": "it was only for tests",
    "worker.fake_step_ms": "it was only for tests, which set PANDO_FAKE_STEP_MS",
    "worker.fake_vocabulary_size": "it was only for tests",
    "worker.grammar_cache_megabytes_per_subject": "it is an eighth of worker.grammars.cache_megabytes",
    "worker.profile_max_megabytes": CONSTANT,
    "worker.profile_max_passes": CONSTANT,
    "worker.storage_threads": CONSTANT,
}
# The sections that a table `models.NAME` may have.
OF_MODELS = ("tokenizer", "scheduler", "worker", "detokenizer")
_ABSENT = object()


class OldNames:
    """Translates old names of settings in the sources of one process; `warnings` names those that occurred."""

    def __init__(self, prefix: str) -> None:
        """`prefix` is that of environment variables."""
        self._prefix = prefix
        self._seen: dict[str, None] = {}

    @property
    def warnings(self) -> list[str]:
        """One message per old name, in the order of occurrence."""
        return [
            f"{name} is now {RENAMED[name]}; the next version will refuse the old name"
            if name in RENAMED
            else f"{name} has no effect: {REMOVED[name]}; the next version will refuse it"
            for name in self._seen
        ]

    def report(self, program: str) -> None:
        """Write the warnings to standard error."""
        sys.stderr.writelines(f"{program}: warning: {warning}\n" for warning in self.warnings)

    def in_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line with new names: --OLD VALUE, --OLD=VALUE, and JSON for whole sections.

        Raises:
            ConfigurationError: a setting is given under both names.
        """
        translated: list[str] = []
        spellings = _Spellings()
        rest = iter(arguments)
        for argument in rest:
            flag, equals, value = argument.partition("=")
            name = flag.removeprefix("--")
            if flag == name:
                translated.append(argument)
            elif not _concerns(name):
                spellings.add(name, flag)
                translated.append(argument)
            elif not equals and (following := next(rest, None)) is None:
                translated.append(argument)  # the parser reports the missing value
            else:
                new, value = self._entry(name, value if equals else following or "")
                if new is not None:
                    spellings.add(new, flag)
                    translated += [f"--{new}={value}"] if equals else [f"--{new}", value]
        return translated

    def in_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with new names.

        Raises:
            ConfigurationError: a setting is given under both names.
        """
        translated = {name: value for name, value in environ.items() if not name.startswith(self._prefix)}
        spellings = _Spellings()
        for variable, value in environ.items():
            if not variable.startswith(self._prefix):
                continue
            name = variable.removeprefix(self._prefix).replace("__", ".").lower()
            new, text = self._entry(name, value)
            if new is not None:
                spellings.add(new, variable)
                translated[variable if new == name else f"{self._prefix}{new}".replace(".", "__").upper()] = text
        return translated

    def in_table(self, table: Mapping[str, Any]) -> dict[str, Any]:  # Any: values before validation
        """Return a table of sections with new names.

        Raises:
            ConfigurationError: a setting is given under both names.
        """
        translated = copy.deepcopy(dict(table))
        values = {name: value for name in (*RENAMED, *REMOVED) if (value := _take(translated, name)) is not _ABSENT}
        for name, value in values.items():
            self._seen[name] = None
            if name in RENAMED:
                _put(translated, name, RENAMED[name], value)
        models = translated.get("models")
        for model in models.values() if isinstance(models, dict) else ():
            if isinstance(model, dict):
                own = {section: model[section] for section in OF_MODELS if isinstance(model.get(section), dict)}
                model |= self.in_table(own)
        return translated

    def _entry(self, name: str, value: str) -> tuple[str | None, str]:
        """Return the new name and value of a flag or variable; None if it is no setting any more."""
        if value.lstrip().startswith("{"):
            if _may_hold_old_names(name):
                return name, self._in_json(name, value)
            if _is_section(name):
                return name, value
        if name in RENAMED or name in REMOVED:
            self._seen[name] = None
            return RENAMED.get(name), value
        return name, value

    def _in_json(self, section: str, text: str) -> str:
        try:
            table = json.loads(text)
        except ValueError:
            return text  # the parser reports it
        return json.dumps(self.in_table({section: table})[section])


class _Spellings:
    """Which spelling of each setting one source used first."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def add(self, name: str, spelling: str) -> None:
        """Raise ConfigurationError if the setting `name` was given in another spelling before."""
        first = self._of.setdefault(name, spelling)
        if first != spelling:
            raise ConfigurationError(f"{first} and {spelling} are the same setting: give only {name}")


def _concerns(name: str) -> bool:
    """Whether `name` is an old name, or a section whose JSON form can contain some."""
    return name in RENAMED or name in REMOVED or _may_hold_old_names(name)


def _may_hold_old_names(name: str) -> bool:
    """Whether `name` is a section whose JSON form can contain old names."""
    return name == "models" or any(old.startswith(f"{name}.") for old in (*RENAMED, *REMOVED))


def _is_section(name: str) -> bool:
    """Whether the old name of a setting is now a section, whose value is a table."""
    return RENAMED.get(name, "").startswith(f"{name}.")


def _take(table: dict[str, Any], name: str) -> object:
    """Remove and return the value of an old name."""
    *path, last = name.split(".")
    for part in path:
        inner = table.get(part)
        if not isinstance(inner, dict):
            return _ABSENT
        table = inner
    if last not in table or (_is_section(name) and isinstance(table[last], dict)):
        return _ABSENT
    return table.pop(last)


def _put(table: dict[str, Any], old: str, new: str, value: object) -> None:
    *path, last = new.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"{old} is now {new}, but {'.'.join(path)} is not a table")
    if last in table:
        raise ConfigurationError(f"{old} and {new} are the same setting: give only {new}")
    table[last] = value
