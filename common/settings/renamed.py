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
from common.section import FILE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROFILE = "it is a constant of PrivacyProfile (docs/privacy.md)"
CONSTANT = "it is a constant"
FLOOR = "cache_floor in the limits file determines it (limits.file)"
ALGORITHMS = "all asymmetric algorithms are accepted, and each key of gateway.jwt.keys determines its own"


def constant(value: str) -> str:
    """Return the reason for a setting whose only value is now its former default."""
    return f"its value is always {value}"


# Old name: new name. NAME stands for a key that the operator chose.
RENAMED = {
    "detokenizer.metrics_host": "metrics.host",
    "gateway.certificate": "gateway.tls.certificate",
    "gateway.client_authority": "gateway.tls.client_authority",
    "gateway.jwt_admin_scope": "gateway.jwt.admin_scope",
    "gateway.jwt_audience": "gateway.jwt.audience",
    "gateway.jwt_issuer": "gateway.jwt.issuer",
    "gateway.jwt_keys": "gateway.jwt.keys",
    "gateway.jwt_tenant_claim": "gateway.jwt.tenant_claim",
    "gateway.jwt_user_claim": "gateway.jwt.user_claim",
    "gateway.key": "gateway.tls.key",
    "gateway.limits_file": "limits.file",
    "gateway.metrics_host": "metrics.host",
    "gateway.models.NAME.scheduler": "gateway.models.NAME.schedulers",
    "gateway.responses_file": "gateway.responses.file",
    "gateway.responses_lifetime_days": "gateway.responses.lifetime_days",
    "gateway.responses_max_bytes": "gateway.responses.max_bytes",
    "gateway.scheduler": "gateway.schedulers",
    "gateway.scheduler_admin_token": "scheduler.admin_token",
    "gateway.scheduler_admin_token_file": "scheduler.admin_token",
    "gateway.state": "gateway.state.url",
    "gateway.state.secret_file": "gateway.state.secret",
    "gateway.state.url_file": "gateway.state.url",
    "gateway.state_failure": "gateway.state.failure",
    "gateway.state_file": "gateway.state.url",
    "gateway.state_prefix": "gateway.state.prefix",
    "gateway.state_secret": "gateway.state.secret",
    "gateway.state_secret_file": "gateway.state.secret",
    "scheduler.admin_token_file": "scheduler.admin_token",
    "scheduler.cache": "scheduler.cache.mode",
    "scheduler.cache_content_check": "scheduler.content_check.enabled",
    "scheduler.cache_decision_log": "scheduler.cache.decision_log",
    "scheduler.cache_eviction": "scheduler.cache.eviction",
    "scheduler.cache_host_gigabytes": "scheduler.host_tier.gigabytes",
    "scheduler.cache_host_pages": "scheduler.host_tier.pages",
    "scheduler.cache_host_policy": "scheduler.host_tier.write_policy",
    "scheduler.cache_promotion_epochs": "scheduler.cache.promotion_epochs",
    "scheduler.cache_promotion_subjects": "scheduler.cache.promotion_subjects",
    "scheduler.cache_quota_share": "scheduler.cache.quota_share",
    "scheduler.cache_share_across_tenants": "scheduler.cache.share_across_tenants",
    "scheduler.cache_strict_numerics": "scheduler.cache.strict_numerics",
    "scheduler.content_detectors": "scheduler.content_check.detectors",
    "scheduler.content_rules": "scheduler.content_check.rules",
    "scheduler.epoch_seconds": "scheduler.cache.epoch_seconds",
    "scheduler.limits_file": "limits.file",
    "scheduler.max_lease_steps": "scheduler.max_steps_per_plan",
    "scheduler.max_waiting_requests": "scheduler.queue.max_waiting_requests",
    "scheduler.metrics_host": "metrics.host",
    "scheduler.policy": "scheduler.queue.policy",
    "scheduler.session_limit": "scheduler.sessions.limit",
    "scheduler.session_limit_total": "scheduler.sessions.limit_total",
    "scheduler.session_share": "scheduler.sessions.share",
    "scheduler.session_share_total": "scheduler.sessions.share_total",
    "scheduler.session_timeout_s": "scheduler.sessions.timeout_s",
    "scheduler.storage_keyring": "scheduler.storage.keyring",
    "scheduler.storage_megabytes_per_s": "scheduler.storage.megabytes_per_s",
    "scheduler.storage_min_tokens": "scheduler.storage.min_tokens",
    "scheduler.storage_prefetch": "scheduler.storage.prefetch",
    "scheduler.storage_secret": "scheduler.storage.secret",
    "scheduler.storage_write": "scheduler.storage.write",
    "tokenizer.metrics_host": "metrics.host",
    "tokenizer.routing": "tokenizer.routing.policy",
    "tokenizer.scheduler": "tokenizer.schedulers",
    "worker.grammar_seconds_per_minute": "worker.grammars.seconds_per_minute",
    "worker.metrics_host": "metrics.host",
    "worker.profile_directory": "worker.profile.directory",
    "worker.storage": "worker.storage.location",
    "worker.storage_gigabytes": "worker.storage.gigabytes",
    "worker.storage_timeout_s": "worker.storage.timeout_s",
}
# Old names of settings that held the path of a file with a secret.
FILES = {
    "gateway.scheduler_admin_token_file",
    "gateway.state.secret_file",
    "gateway.state.url_file",
    "gateway.state_file",
    "gateway.state_secret_file",
    "scheduler.admin_token_file",
}

# Old name: why it is no setting any more. Its value has no effect.
REMOVED = {
    "detokenizer.drain_s": constant("15 s"),
    "gateway.admission_deadline_s": constant("600 s"),
    "gateway.default_tenant": constant("`default`"),
    "gateway.jwt.algorithms": ALGORITHMS,
    "gateway.jwt_algorithms": ALGORITHMS,
    "gateway.jwt_cache_s": CONSTANT,
    "gateway.keep_alive_s": constant("15 s"),
    "gateway.resume.attempts": constant("5"),
    "gateway.resume.deadline_s": constant("600 s"),
    "gateway.resume_attempts": constant("5"),
    "gateway.resume_deadline_s": constant("600 s"),
    "gateway.silence_timeout_s": constant("600 s"),
    "gateway.state_timeout_s": CONSTANT,
    "gateway.stream_buffer_bytes": constant("1 MiB"),
    "scheduler.cache.checked_paths": constant("8"),
    "scheduler.cache.floor_share": FLOOR,
    "scheduler.cache.tenant_floor_share": FLOOR,
    "scheduler.cache_active_epochs": PROFILE,
    "scheduler.cache_checked_paths": constant("8"),
    "scheduler.cache_continuation_limit": PROFILE,
    "scheduler.cache_creators_limit": PROFILE,
    "scheduler.cache_demotion_quarantines": PROFILE,
    "scheduler.cache_demotion_tenants": PROFILE,
    "scheduler.cache_diversity_min": PROFILE,
    "scheduler.cache_few_creators": PROFILE,
    "scheduler.cache_floor_share": FLOOR,
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
    "scheduler.cache_tenant_floor_share": FLOOR,
    "scheduler.cache_verdict_epochs": PROFILE,
    "scheduler.cache_watched_pairs": PROFILE,
    "scheduler.content_check.deadline_s": constant("5 s"),
    "scheduler.content_deadline_s": constant("5 s"),
    "scheduler.fair_output_weight": constant("2"),
    "scheduler.fair_slack_tokens": CONSTANT,
    "scheduler.jump_tokens": constant("16"),
    "scheduler.lease_ms": constant("8 ms"),
    "scheduler.plans_in_flight": constant("2"),
    "scheduler.priority_preemptions": constant("2"),
    "scheduler.queue.fair_output_weight": constant("2"),
    "scheduler.queue.priority_preemptions": constant("2"),
    "scheduler.queue_depth": constant("2"),
    "scheduler.session_limit_tenant": "it is three quarters of scheduler.sessions.limit_total",
    "scheduler.session_share_tenant": "it is three quarters of scheduler.sessions.share_total",
    "scheduler.session_timeout_limit_s": "it is an hour, or scheduler.sessions.timeout_s if that is greater",
    "scheduler.sessions.timeout_limit_s": "it is an hour, or scheduler.sessions.timeout_s if that is greater",
    "scheduler.storage.wait_ms": constant("500 ms"),
    "scheduler.storage_pages_in_flight": CONSTANT,
    "scheduler.storage_wait_ms": constant("500 ms"),
    "scheduler.target_plan_ms": constant("8 ms"),
    "scheduler.window_ratio": constant("0.25"),
    "tokenizer.drain_s": constant("5 s"),
    "tokenizer.max_pending_requests": constant("4,096"),
    "tokenizer.routing.prefix_tokens": constant("64 tokens"),
    "tokenizer.routing_load_factor": CONSTANT,
    "tokenizer.routing_prefix_tokens": constant("64 tokens"),
    "worker.fake_eos_probability": "it was only for tests",
    "worker.fake_step_ms": "it was only for tests, which set PANDO_FAKE_STEP_MS",
    "worker.fake_vocabulary_size": "it was only for tests",
    "worker.grammar_cache_megabytes": constant("512 MiB"),
    "worker.grammar_cache_megabytes_per_subject": constant("64 MiB"),
    "worker.grammar_open_per_subject": constant("16"),
    "worker.grammar_slice_s": constant("1 s"),
    "worker.grammar_timeout_s": constant("30 s"),
    "worker.grammars.cache_megabytes": constant("512 MiB"),
    "worker.grammars.open_per_subject": constant("16"),
    "worker.grammars.slice_s": constant("1 s"),
    "worker.grammars.timeout_s": constant("30 s"),
    "worker.profile.max_seconds": constant("60 s"),
    "worker.profile_max_megabytes": CONSTANT,
    "worker.profile_max_passes": CONSTANT,
    "worker.profile_max_seconds": constant("60 s"),
    "worker.storage_threads": CONSTANT,
}
# A part of a name that stands for a key that the operator chose.
KEY = "NAME"
# The sections that a table `models.NAME` may have.
OF_MODELS = ("tokenizer", "scheduler", "worker", "detokenizer")


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
            f"{name} is now {RENAMED[name]}{', with the value file:PATH' if name in FILES else ''}; the next version "
            "will refuse the old name"
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
            ConfigurationError: a setting is given under several names.
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
                for new, text in self._entries(name, value if equals else following or ""):
                    if spellings.add(new, flag, None if new == name else text):
                        translated += [f"--{new}={text}"] if equals else [f"--{new}", text]
        return translated

    def in_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with new names.

        Raises:
            ConfigurationError: a setting is given under several names.
        """
        translated = {name: value for name, value in environ.items() if not name.startswith(self._prefix)}
        spellings = _Spellings()
        for variable, value in environ.items():
            if not variable.startswith(self._prefix):
                continue
            name = variable.removeprefix(self._prefix).replace("__", ".").lower()
            for new, text in self._entries(name, value):
                spellings.add(new, variable, text)
                translated[variable if new == name else f"{self._prefix}{new}".replace(".", "__").upper()] = text
        return translated

    def in_table(self, table: Mapping[str, Any]) -> dict[str, Any]:  # Any: values before validation
        """Return a table of sections with new names.

        Raises:
            ConfigurationError: a setting is given under several names.
        """
        translated = copy.deepcopy(dict(table))
        spellings = _Spellings()
        self._translate(translated, translated, spellings, "")
        models = translated.get("models")
        for key, model in models.items() if isinstance(models, dict) else ():
            if isinstance(model, dict):
                own = {section: model[section] for section in OF_MODELS if isinstance(model.get(section), dict)}
                self._translate(own, translated, spellings, f"models.{key}.")
                model |= own
        return translated

    def _translate(self, table: dict[str, Any], root: dict[str, Any], spellings: _Spellings, path: str) -> None:
        """Rename the settings in `table`, whose place in `root` is `path`; those of other sections move to `root`."""
        taken = [(old, *found) for old in (*RENAMED, *REMOVED) for found in _take(table, old.split("."))]
        for old, keys, value in taken:
            self._seen[old] = None
            if old not in RENAMED:
                continue
            given, new = path + _filled(old, keys), _filled(RENAMED[old], keys)
            is_own = new.partition(".")[0] == old.partition(".")[0]
            value = _converted(old, value)
            if spellings.add(path + new if is_own else new, given, value):
                _put(table if is_own else root, given, new, value)

    def _entries(self, name: str, value: str) -> Iterator[tuple[str, str]]:
        """Yield the new names and values of a flag or variable: usually one, none if it is no setting any more."""
        if value.lstrip().startswith("{"):
            if _may_hold_old_names(name):
                yield from self._in_json(name, value)
                return
            if _is_section(name):
                yield name, value
                return
        if name in RENAMED:
            self._seen[name] = None
            yield RENAMED[name], str(_converted(name, value))
        elif name in REMOVED:
            self._seen[name] = None
        else:
            yield name, value

    def _in_json(self, section: str, text: str) -> Iterator[tuple[str, str]]:
        """Yield the translated section, and the settings in it that are now in other sections."""
        try:
            table = json.loads(text)
        except ValueError:
            yield section, text  # the parser reports it
            return
        *path, last = section.split(".")
        nested: dict[str, Any] = {last: table}
        for part in reversed(path):
            nested = {part: nested}
        translated = self.in_table(nested)
        for name, value in list(_leaves(translated, section)):
            yield name, value if isinstance(value, str) else json.dumps(value)


class _Spellings:
    """How each setting was first given in one source: in which spelling, and with which value if it is an old name."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, object]] = {}

    def add(self, name: str, spelling: str, value: object = None) -> bool:
        """Return whether the setting `name` is given for the first time, or again in the same spelling.

        Several names of one setting may have the same value.

        Raises:
            ConfigurationError: it was given in another spelling before.
        """
        first, of_first = self._of.setdefault(name, (spelling, value))
        if first == spelling:
            return True
        if value is None or value != of_first:
            raise ConfigurationError(f"{first} and {spelling} are the same setting: give only {name}")
        return False


def _concerns(name: str) -> bool:
    """Whether `name` is an old name, or a section whose JSON form can contain some."""
    return name in RENAMED or name in REMOVED or _may_hold_old_names(name)


def _may_hold_old_names(name: str) -> bool:
    """Whether `name` is a section whose JSON form can contain old names."""
    return name == "models" or any(old.startswith(f"{name}.") for old in (*RENAMED, *REMOVED))


def _is_section(name: str) -> bool:
    """Whether the old name of a setting is now a section, whose value is a table."""
    return RENAMED.get(name, "").startswith(f"{name}.")


def _converted(old: str, value: Any) -> Any:  # Any: values before validation
    """Return the value that the new name of `old` has for `value`."""
    return f"{FILE_PREFIX}{value}" if old in FILES else value


def _filled(name: str, keys: Sequence[str]) -> str:
    """Return `name` with the operator's keys in place of `KEY`."""
    rest = iter(keys)
    return ".".join(next(rest) if part == KEY else part for part in name.split("."))


def _take(table: dict[str, Any], path: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Remove an old name, and tables that are empty without it; yield the operator's keys in it and the value."""
    first, *rest = path
    if not rest:
        if first in table:
            yield (), table.pop(first)
        return
    for key in list(table) if first == KEY else [first]:
        inner = table.get(key)
        if not isinstance(inner, dict):
            continue
        # A table in place of an old setting is the section with this name.
        if len(rest) == 1 and isinstance(inner.get(rest[0]), dict):
            continue
        for keys, value in _take(inner, rest):
            yield ((key, *keys) if first == KEY else keys), value
            if not inner:
                table.pop(key, None)


def _leaves(table: Mapping[str, Any], whole: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the section `whole` as one table, and all other settings by name."""
    for key, value in table.items():
        name = f"{path}{key}"
        if isinstance(value, dict) and name != whole:
            yield from _leaves(value, whole, f"{name}.")
        else:
            yield name, value


def _put(table: dict[str, Any], old: str, new: str, value: object) -> None:
    *path, last = new.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"{old} is now {new}, but {'.'.join(path)} is not a table")
    if table.get(last, value) != value:
        raise ConfigurationError(f"{old} and {new} are the same setting: give only {new}")
    table[last] = value
