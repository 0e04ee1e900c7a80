"""The one configuration schema of all services.

Sources, strongest first: command-line flags (`--scheduler.max_rows 32`), environment (`PANDO_SCHEDULER__MAX_ROWS=32`),
the TOML file named by `--config` or `PANDO_CONFIG`, the defaults below. Unknown keys are errors in each of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from common.backend_settings import BackendSettings  # noqa: TC001  (pydantic reads it at run time)
from common.errors import ConfigurationError
from common.identity_settings import IdentitySettings
from common.queue_settings import QueueSettings
from common.rpc_settings import RpcSettings
from common.section import Section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "PANDO_"
CONFIG_VARIABLE = "PANDO_CONFIG"


class ModelSettings(Section):
    """What is served."""

    reference: str = "smollm2-135m-instruct"
    """A bundled model's name, a directory with config.json, or a GGUF file, as each host sees it."""
    served_name: str | None = None
    """The name clients use; by default the reference's last part."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy", "fake"] = "auto"
    """`dummy`: random weights from config.json. `fake`: no model at all, for tests of the protocol."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Element type of the weights; auto: the checkpoint's own on a GPU, on a CPU bfloat16 if it can multiply that,
    else float32."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Element type of the KV pool; auto follows dtype."""
    tool_style: Literal["auto", "none", "hermes", "llama3", "mistral", "pythonic"] = "auto"
    """How the model writes tool calls; auto: as its chat template does."""
    reasoning_style: Literal["auto", "none", "think"] = "auto"
    """think: reasoning stands in <think> blocks; auto: if the chat template knows them."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """Which hidden states become embeddings, unless a request says otherwise: the last token's, the mean of all, or the
    first token's (encoders only); auto: as the model's files say, else the mean in encoders and the last in others."""
    max_context: int = Field(default=0, ge=0)
    """Tokens of prompt and output together; 0: the model's own limit."""

    @property
    def name(self) -> str:
        """The model name that clients use."""
        return self.served_name or Path(self.reference).name


class ServedModelSettings(ModelSettings):
    """One of several models: what differs from the sections that all of them share."""

    aliases: tuple[str, ...] = ()
    """What else clients may call it."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel worker processes."""
    # Any: each section checks its own values once they are put on top of the shared ones.
    tokenizer: dict[str, Any] = Field(default_factory=dict)
    scheduler: dict[str, Any] = Field(default_factory=dict)
    worker: dict[str, Any] = Field(default_factory=dict)
    detokenizer: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_reference(cls, value: object) -> object:
        return {"reference": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_called_by_its_key(self) -> Self:
        if self.served_name is not None:
            raise ValueError("a model is called by its name in `models`; give others in aliases")
        return self


class LogSettings(Section):
    """How services log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, JSON lines otherwise."""


class GatewaySettings(IdentitySettings):
    """HTTP front end."""

    host: str = "127.0.0.1"
    """Interface to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0 picks a free one."""
    certificate: Path | None = None
    """Certificate with its chain (PEM) to serve HTTPS with; read anew when the file changes. Absent: HTTP."""
    key: Path | None = None
    """The private key that belongs to it (PEM)."""
    client_authority: Path | None = None
    """Authorities (PEM) of clients' certificates: who shows none of theirs is refused. Absent: clients need none.
    Health, readiness and metrics are then answered at rpc.probe_port, too, in plaintext, for who cannot show one."""
    tokenizer: str = "127.0.0.1:50051"
    """Address of the tokenizer."""
    detokenizer: str = "127.0.0.1:50054"
    """Address of the detokenizer."""
    scheduler: str | None = None
    """Address of the scheduler, for administration only; absent: such endpoints answer 503."""
    schedulers: tuple[str, ...] = ()
    """Addresses of several scheduler groups, in the place of `scheduler`: what tokenizer.schedulers says."""
    models: dict[str, BackendSettings] = Field(default_factory=dict)
    """Several models by the names that their tokenizers serve, in the place of the addresses above; in flags and
    environment as JSON: {"small": {"tokenizer": "host:port", "detokenizer": "host:port"}}."""
    default_model: str | None = None
    """What requests mean that name no model; absent: they are refused, except where clients never name one and there is
    only one."""
    scheduler_admin_token: SecretStr | None = None
    """The schedulers' admin token, if they have one: they flush caches for nobody else."""
    scheduler_admin_token_file: Path | None = None
    """File that holds it instead."""
    responses_file: Path | None = None
    """SQLite database of stored responses; absent: one in memory, as long as the gateway lives."""
    responses_lifetime_days: float = Field(default=30.0, gt=0)
    """How long responses are stored."""
    responses_max_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Room for stored responses; one credential's may take a quarter of it. Beyond that the oldest go."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest request body; more is answered with 413."""
    max_open_requests: int = Field(default=8192, ge=1)
    """Prompts that may be open at the same time; more are answered with 429."""
    stream_buffer_bytes: int = Field(default=1024 * 1024, ge=1024)
    """How much of a stream may wait for a slow client before its request is aborted."""
    keep_alive_s: float = Field(default=15.0, gt=0)
    """A stream on which nothing has been sent for so long gets a comment, so that nobody on the way closes it."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Limit of a request from arrival to finish; absent: only the scheduler's own limits."""
    resume_attempts: int = Field(default=5, ge=0)
    """How often a choice is continued after a service that worked on it went away."""
    resume_deadline_s: float = Field(default=60.0, ge=0)
    """How long an interrupted choice may wait for its next token."""
    admission_deadline_s: float = Field(default=10.0, ge=0)
    """How long a new request may wait for a ring that is away, before 503."""
    silence_timeout_s: float = Field(default=600.0, gt=0)
    """A request of which the ring said nothing for so long is taken for lost; above the scheduler's waiting timeout."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long open requests may go on after SIGTERM."""


class TokenizerSettings(Section):
    """Text to ids."""

    address: str = "127.0.0.1:50051"
    """gRPC address to listen on: host:port or unix:path."""
    scheduler: str = "127.0.0.1:50052"
    """Address of the scheduler."""
    schedulers: tuple[str, ...] = ()
    """Addresses of several scheduler groups, in the place of `scheduler`; dns:host:port stands for all addresses behind
    the host, which is looked up again and again."""
    routing: Literal["prefix_aware", "least_loaded", "round_robin"] = "prefix_aware"
    """Which group gets a request: always the same for one user's prompts that begin alike; the one with the fewest open
    requests; or one after the other."""
    routing_prefix_tokens: int = Field(default=64, ge=0)
    """With routing prefix_aware: prompts of one user begin alike if so many tokens are the same; 0: all of them do."""
    routing_load_factor: float = Field(default=1.25, gt=1)
    """With routing prefix_aware: no group gets more than so many times its share of the open requests."""
    threads: int = Field(default=2, ge=1)
    """Threads that encode."""
    max_pending_requests: int = Field(default=4096, ge=1)
    """Requests that are encoded or wait for the scheduler's answer; more are refused with a hint when to retry."""
    drain_s: float = Field(default=5.0, ge=0)
    """How long requests that are being submitted may still be answered after the signal to stop."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint; absent: none."""


class SchedulerSettings(QueueSettings):
    """Queues, cache, step plans."""

    address: str = "127.0.0.1:50052"
    """gRPC address to listen on: host:port or unix:path."""
    workers: tuple[str, ...] = ("127.0.0.1:50053",)
    """Addresses of the tensor-parallel ranks, rank 0 first."""
    rendezvous: str = "127.0.0.1:29555"
    """host:port at which the ranks find each other; used with two or more."""
    detokenizer: str = "127.0.0.1:50054"
    """Address of the detokenizer."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint; absent: none."""
    page_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV page: the unit of matching, sharing and transfer."""
    max_rows: int = Field(default=64, ge=1, le=4096)
    """Requests that run at the same time."""
    max_step_tokens: int = Field(default=512, ge=16)
    """Tokens of one step, decode and prefill together; small steps keep decoding smooth, large ones prefill fast."""
    mixed_step_tokens: int | None = Field(default=None, ge=16)
    """Prompt tokens of a step in which rows decode, while few wait: then decoding is smooth. Of more, a step takes
    half, up to max_step_tokens, so that the queue does not grow. Absent: always as many as fit."""
    device_pages: int | None = Field(default=None, ge=1)
    """KV pages on the device; absent: sized by the worker from free memory."""
    memory_fraction: float = Field(default=0.85, gt=0, le=1)
    """Share of free memory that the worker may take for weights and KV."""
    window_ratio: float = Field(default=0.25, ge=0, le=1)
    """For models of which some layers attend to a window only (Gemma 3): pages of those layers for each page of the
    others, but enough for the windows of all rows if there is room. 0: all layers keep all tokens, in one pool, as they
    do with a host tier or cache_decision_log."""
    queue_depth: int = Field(default=2, ge=1, le=16)
    """Plans in flight: 2 hides the network behind the step before."""
    lease_ms: float = Field(default=8.0, ge=0)
    """Aim for a plan's duration when nothing waits: a plan spans so many steps that it lasts about this long."""
    max_lease_steps: int = Field(default=16, ge=1, le=256)
    """Upper bound on the steps of one plan."""
    waiting_timeout_s: float = Field(default=300.0, gt=0)
    """A request that has not started by then fails with a timeout."""
    running_timeout_s: float = Field(default=3600.0, gt=0)
    """A request that has not finished so long after its start fails with a timeout."""
    worker_timeout_s: float = Field(default=120.0, gt=0)
    """Without any result for so long while plans are in flight, the worker group is taken for dead."""
    drain_s: float = Field(default=10.0, ge=0)
    """After SIGTERM, open requests get this long to finish."""
    admin_token: SecretStr | None = None
    """Callers that send `authorization: Bearer TOKEN` see owners and token ids in state dumps, and may forget users and
    pin prompts; absent: nobody does. When it is set, flush, pause and resume need it, too."""
    admin_token_file: Path | None = None
    """File that holds the admin token instead."""


class WorkerSettings(Section):
    """One rank of the model."""

    address: str = "127.0.0.1:50053"
    """gRPC address to listen on: host:port or unix:path."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    device_index: int = Field(default=0, ge=0)
    """Which GPU of this host."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0: as many as this process has cores."""
    backend: Literal["auto", "torch", "compiled", "gpu"] = "auto"
    """Operators: compiled ones on CPUs where they can be built, Triton and FlashInfer on GPUs, or plain torch."""
    grammar_timeout_s: float = Field(default=30.0, gt=0)
    """A grammar (JSON schema, regular expression, …) that takes longer to compile is refused."""
    storage: SecretStr | None = None
    """Where KV pages outlive this process and are shared with others: a directory, or a Redis or Valkey server as
    redis://, rediss:// or unix:// URL; absent: nowhere. All who can read it are trusted with what users have said."""
    storage_gigabytes: float = Field(default=16.0, gt=0)
    """GiB that the files of a storage directory may take; a server has a limit of its own (maxmemory)."""
    storage_timeout_s: float = Field(default=2.0, gt=0)
    """A call to the storage that takes longer counts as failed."""
    storage_threads: int = Field(default=4, ge=1, le=64)
    """Calls to the storage at the same time; half of them may write."""
    keep_warm_ms: float = Field(default=0.0, ge=0)
    """An idle GPU gets a little work of no use after so long, again and again, so that its clocks stay up and the next
    request finds it fast; costs power. 0: never. On a CPU nothing is done."""
    profile_directory: Path | None = None
    """Where `pando profile` leaves traces of what this rank computes; absent: it records none. Anyone who reaches the
    worker may start a recording, which slows it down while it lasts."""
    profile_max_seconds: float = Field(default=60.0, gt=0, le=3600)
    """A recording ends by itself after so long,"""
    profile_max_passes: int = Field(default=1000, ge=1)
    """or after so many forward passes: each takes some hundred kilobytes of memory until it is written."""
    profile_max_megabytes: int = Field(default=1024, ge=1)
    """No recording begins while the traces in the directory take so much."""
    fake_vocabulary_size: int = Field(default=49_152, ge=16)
    """Vocabulary of a model loaded with load_format=fake."""
    fake_step_ms: float = Field(default=0.0, ge=0)
    """How long a forward pass of a fake model takes."""
    fake_eos_probability: float = Field(default=0.0, ge=0, le=1)
    """How likely a fake model ends its answer with each token; 0: it never does."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint; absent: none."""


class DetokenizerSettings(Section):
    """Ids to text."""

    address: str = "127.0.0.1:50054"
    """gRPC address to listen on: host:port or unix:path."""
    drain_s: float = Field(default=15.0, ge=0)
    """How long open choices may still finish after the signal to stop."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint; absent: none."""


class Settings(BaseSettings):
    """Everything that can be configured; each service reads its own section, `model` and `log`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    model: ModelSettings = ModelSettings()
    models: dict[str, ServedModelSettings] = Field(default_factory=dict)
    """Several models for `pando up`, by the names that clients use: each a reference alone, or with settings of its own
    beside those that all share. Absent: `model` alone."""
    log: LogSettings = LogSettings()
    rpc: RpcSettings = RpcSettings()
    gateway: GatewaySettings = GatewaySettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    worker: WorkerSettings = WorkerSettings()
    detokenizer: DetokenizerSettings = DetokenizerSettings()


def load_settings(
    program: str, description: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings of a process from flags, environment and file; exit with a clear message if they are wrong."""
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    try:
        return parse_settings(parser, sys.argv[1:] if argv is None else argv, environ)[0]
    except ConfigurationError as error:
        parser.exit(2, f"{program}: {error}\n")


def parse_settings(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Settings, argparse.Namespace]:
    """Add the schema's flags to `parser`, parse `argv`, and return settings and the parser's own arguments.

    Raises:
        ConfigurationError: a key is unknown or a value does not fit; the message names it.
    """
    environ = os.environ if environ is None else environ
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings (or {CONFIG_VARIABLE})")
    flags: CliSettingsSource[Any] = CliSettingsSource(
        Settings, root_parser=parser, cli_parse_args=None, cli_hide_none_type=True, cli_avoid_json=True
    )
    arguments = parser.parse_args(list(argv))
    file = arguments.config or environ.get(CONFIG_VARIABLE)
    check_environment(environ)
    try:
        flags = flags(parsed_args=arguments)
    except ValueError as error:  # a flag of a table that is no table
        raise ConfigurationError(str(error)) from error
    return _build(flags, Path(file) if file else None), arguments


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable that looks like a setting (PANDO_SECTION__FIELD) but is none."""
    known = {
        f"{PREFIX}{section}__{name}".upper()
        for section, field in Settings.model_fields.items()
        for name in getattr(field.annotation, "model_fields", {})
    }
    for name in environ:
        if name.startswith(PREFIX) and "__" in name and name not in known:
            raise ConfigurationError(f"unknown setting in the environment: {name}")


def _build(flags: CliSettingsSource[Any], file: Path | None) -> Settings:
    if file is not None and not file.is_file():
        raise ConfigurationError(f"configuration file not found: {file}")

    class Layered(Settings):
        """Settings with this process's own sources."""

        layers: ClassVar[CliSettingsSource[Any]] = flags

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """Order the sources, strongest first."""
            sources: tuple[PydanticBaseSettingsSource, ...] = (cls.layers, env_settings)
            return (*sources, TomlConfigSettingsSource(settings_cls, file)) if file else sources

    try:
        return Layered()
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from error
    except ValueError as error:  # a TOML syntax error, or a value that is no JSON
        raise ConfigurationError(f"{file or 'settings'}: {error}") from error


def explain(error: ValidationError) -> str:
    """Return one line per wrong setting."""
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        unknown = detail["type"] == "extra_forbidden"
        lines.append(f"unknown setting: {name}" if unknown else f"{name}: {detail['msg']} (got {detail['input']!r})")
    return "; ".join(lines)
