"""The gateway's section of the configuration, and the sections in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, StringConstraints

from common.section import Addresses, AtLeast, Section

# Without scheme, port and wildcards.
# A host name in which * stands for any characters, with a port or without.
HostPattern = Annotated[str, Field(pattern=r"^[^\s/@:\[\]]+(:[0-9]{1,5})?$")]
HostName = Annotated[
    str, StringConstraints(to_lower=True, max_length=253, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
]


class BackendSettings(Section):
    """Addresses of one of several models; fields have the same meaning as in the section `gateway`."""

    tokenizer: Addresses = Field(min_length=1)
    """Addresses of the model's tokenizers."""
    detokenizer: Addresses = Field(min_length=1)
    """Addresses of its detokenizers."""
    schedulers: Addresses = ()
    """Addresses of its scheduler groups, for administration only."""
    aliases: tuple[str, ...] = ()
    """Other names by which clients may request the model."""


class TlsSettings(Section):
    """HTTPS at the API's port."""

    certificate: Path | None = None
    """Certificate and chain (PEM) for HTTPS; reloaded when the file changes. Absent: HTTP."""
    key: Path | None = None
    """Private key of the certificate (PEM)."""
    client_authority: Path | None = None
    """Authorities (PEM) for client certificates: connections without a certificate of theirs are refused. For probes
    that have none, health and readiness are then also served at rpc.probe_port, in plaintext. Absent: clients need no
    certificate."""


class JwtSettings(Section):
    """Signed tokens (JSON Web Tokens) as credentials."""

    keys: str | None = None
    """JSON Web Key Set that tokens are verified with: a file or an https URL. Absent: tokens are not accepted."""
    issuer: str | None = None
    """Required value of a token's claim `iss`; mandatory with keys."""
    audience: str | None = None
    """Value that a token's claim `aud` must contain; mandatory with keys."""
    tenant_claim: str | None = None
    """Claim that names the tenant; absent: all users belong to the tenant `default`."""
    user_claim: str = "sub"
    """Claim that names the user."""
    admin_scope: str | None = None
    """Tokens with this word in `scope` have administrator rights; absent: no token has."""


class StateSettings(Section):
    """The store of the limits' counters, of responses and of recorded answers, which several gateways share."""

    url: SecretStr | None = None
    """Store of the limits' counters, of responses and of recorded answers. Absent or memory: this process, for a single
    gateway. For several gateways: the URL of one Redis or Valkey server (redis://, rediss:// or unix://). It holds
    clients' conversations, so it must not be open to others; it should not evict keys (maxmemory-policy noeviction)."""
    secret: Annotated[SecretStr | None, AtLeast(32)] = None
    """Secret with which gateways sign their requests to each other and encrypt recorded answers: at least 32 characters
    that cannot be guessed, the same for all gateways, and unknown to others who can access the server. Without it,
    administrators can abort others' requests only at the gateway that they call, anyone who can write to the server can
    abort a request whose id and subject they know and forge requests of others, and anyone who can read it can read the
    recorded answers."""
    prefix: str = Field(default="pando", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Prefix of keys and channels on the server; deployments that share a server need different ones."""
    failure: Literal["open", "closed"] = "open"
    """Behaviour while the server is unreachable. open: each gateway enforces the limits on its own, so that N gateways
    allow N times as much. closed: requests that are subject to limits are answered with 503."""


class AnswersSettings(Section):
    """Records of open and recent answers, from which clients continue after their connection broke."""

    lifetime_s: float = Field(default=600.0, ge=0)
    """Seconds after its last token for which an answer can be continued or repeated. Until then its request and output
    are in the gateway's memory or in the server at state.url. 0: nothing is recorded."""
    max_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Bytes of recorded answers, over all gateways; answers beyond it are served without a record. A tenant can use at
    most three quarters of it."""


class ResponsesSettings(Section):
    """Stored responses."""

    file: Path | None = None
    """SQLite database for the stored responses of a single gateway; absent: in memory, lost when the gateway stops."""
    lifetime_days: float = Field(default=30.0, gt=0)
    """Days for which responses are stored."""
    max_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Bytes of stored responses, over all gateways. Above it, the tenant that uses most, and within it the subject that
    uses most, loses its oldest responses."""


class PriceSettings(Section):
    """The price of a million tokens of a model."""

    input: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Of prompts."""
    cached_input: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of the part of prompts that came from the cache; absent: as `input`."""
    output: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Of output."""
    currency: str = Field(default="$", max_length=8)
    """Written before amounts."""


class ConsoleSettings(Section):
    """The web console, at /console."""

    enabled: bool = True
    """Serve the web console at /console. Its pages hold no data of their own: what administrators see needs their
    credential, as everywhere."""
    attack_report: Path | None = None
    """File that `pando attack --every 6h --json` writes; the console shows its verdicts, and metrics have them, also
    with the console disabled. Absent: there are none."""
    prices: dict[str, PriceSettings] = Field(default_factory=dict)
    """Prices by the model's name; the chat shows what each answer cost. Nothing is charged by them."""


class BatchesSettings(Section):
    """Uploaded files and batches."""

    file: Path | None = None
    """SQLite database for the files and batches of a single gateway; absent: in memory, lost when the gateway stops.
    With state.url, they are on that server."""
    object_store: str | None = None
    """Where the contents of files are kept, as objects: a URL of fsspec such as s3://bucket/prefix or gs://bucket/prefix
    (extra object-stores), or file:///directory. Everything else stays in `file` or at state.url. Absent: contents are
    there, too. Several gateways need the same store."""
    max_file_bytes: int = Field(default=100 * 1024 * 1024, ge=1024)
    """Largest uploaded file in bytes; larger ones are answered with 413."""
    max_bytes: int = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    """Bytes of all files, over all gateways; further ones are answered with 429. A tenant can use half of it."""
    lifetime_days: float = Field(default=30.0, ge=2)
    """Days for which files are kept."""
    max_lines: int = Field(default=50_000, ge=1)
    """Most lines of a batch."""
    lines_at_once: int = Field(default=512, ge=1)
    """Lines of batches that a gateway submits at a time. To fill the workers' rows, the gateways of a scheduler group
    together need more than scheduler.max_rows."""


class ImagesSettings(Section):
    """Images in requests."""

    urls: tuple[HostPattern, ...] = ()
    """Hosts from which the gateway fetches images and videos that requests name by URL: images.example,
    *.images.example, with another port than the default one images.example:8443, or * for every public host. Absent:
    none are fetched, and clients send data URLs. Hosts with an address that is not public are never connected to."""
    allow_http: bool = False
    """Fetch from URLs with http, too, whose answers anyone on the way can change."""
    url_timeout_s: float = Field(default=10.0, gt=0, le=120)
    """Seconds for which one image is fetched, redirects included."""
    max_total_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, le=48 * 1024 * 1024)
    """Bytes of all images of a request together, as they were before base64. Bodies with images may have max_body_bytes
    and this much in base64; a model's own limits of images are its tokenizer's."""
    open_bytes: int = Field(default=1024 * 1024 * 1024, ge=64 * 1024 * 1024)
    """Bytes of the images of all open requests of a gateway; further requests with images are answered with 429. One
    user's may take 60 % of it, and one tenant's 75 %. A gateway keeps a request until it ends, as it may have to be
    submitted again, with the body that it came in: about two and a half times as much memory."""


class LedgerSettings(Section):
    """The ledger of the tokens that tenants and subjects use."""

    file: Path | None = None
    """SQLite database of the ledger of a single gateway; absent: in memory, lost when the gateway stops. With
    state.url, the server has the ledger of all gateways."""
    lifetime_days: int = Field(default=400, ge=32)
    """Days for which the tokens used in each hour are kept."""
    log_directory: Path | None = None
    """Directory of this gateway's usage log: a JSONL file per day, with a line for each request, exactly once. Needs a
    ledger that is not in memory. Absent: none."""


class GatewaySettings(Section):
    """The HTTP front end."""

    host: str = "127.0.0.1"
    """Interface to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0 selects a free one."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials. Absent: none; administrators can read
    /metrics at the API's port."""
    keys_file: Path | None = None
    """TOML file of API keys, written by `pando keys`; reloaded when it changes. Absent: no key is required."""
    max_priority: int = 0
    """Highest `priority` that a request may set, unless its key has another limit (`pando keys create --max-priority`);
    administrators may set any."""
    anonymous: Literal["auto", "local", "isolated", "vouched", "refuse"] = "auto"
    """How requests without a credential are treated while neither keys nor tokens are configured. local: as requests of
    one person at this machine. isolated: as one subject that finds only public text and is no evidence for sharing.
    auto: local for direct connections over loopback, isolated otherwise. vouched: as auto, but users named in requests
    count as separate people; for tests and benchmarks on closed networks. refuse: they are answered with 401."""
    allowed_hosts: tuple[HostName, ...] = ()
    """Host names besides localhost that are accepted in requests over loopback (in all requests if `anonymous` is
    local) while no keys are required, for example those of a reverse proxy on the gateway's machine. Requests for these
    names have no administrator rights."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks (CIDR) whose direct connections may name tenant and user in the two headers below."""
    tenant_header: str = "x-pando-tenant"
    """Header in which a trusted proxy names the tenant; such requests need no API key."""
    user_header: str = "x-pando-user"
    """Header in which a trusted proxy names the user."""
    cors_origins: tuple[str, ...] = ()
    """Origins (https://chat.example) whose pages may call the API from browsers; "*": all origins. Without API keys,
    requests of such a page count as requests of the browser's user."""
    tokenizer: Addresses = Field(default=("127.0.0.1:50051",), min_length=1)
    """Addresses of the tokenizers, usually a single one; each request goes to the one with the fewest requests of this
    gateway. dns:host:port stands for all addresses that the host name resolves to, which are looked up periodically."""
    detokenizer: Addresses = Field(default=("127.0.0.1:50054",), min_length=1)
    """Addresses of the detokenizers, likewise. Schedulers must have the same ones (scheduler.detokenizer)."""
    schedulers: Addresses = ()
    """Addresses of the scheduler groups, the same as tokenizer.schedulers, for administration only. Absent:
    administrative endpoints answer 503."""
    models: dict[str, BackendSettings] = Field(default_factory=dict)
    """Several models, by the names that their tokenizers serve, instead of the addresses above; in flags and
    environment as JSON: {"small": {"tokenizer": "host:port", "detokenizer": "host:port"}}."""
    adapter_aliases: dict[str, str] = Field(default_factory=dict)
    """Other names by which clients may request models with adapters, each as `model:adapter`."""
    default_model: str | None = None
    """Model for requests that name none. Absent: such requests are refused, unless their endpoint has no model field
    and only one model is served."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest request body in bytes; larger ones are answered with 413."""
    max_open_requests: int = Field(default=8192, ge=1)
    """Prompts that may be open at the same time; further ones are answered with 429."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Time limit of a request in seconds, from arrival to finish; absent: only the scheduler's limits apply."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that open requests have to finish after SIGTERM."""
    tls: TlsSettings = TlsSettings()
    jwt: JwtSettings = JwtSettings()
    state: StateSettings = StateSettings()
    answers: AnswersSettings = AnswersSettings()
    responses: ResponsesSettings = ResponsesSettings()
    console: ConsoleSettings = ConsoleSettings()
    batches: BatchesSettings = BatchesSettings()
    ledger: LedgerSettings = LedgerSettings()
    images: ImagesSettings = ImagesSettings()
