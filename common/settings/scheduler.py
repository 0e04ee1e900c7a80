"""The scheduler's section of the configuration, and the sections in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from common.section import Addresses, AtLeast, Section


class CacheSettings(Section):
    """The prefix cache: rules of sharing, and quotas. Shares are of a tier's pages; durations are in epochs.

    The other constants of the privacy bounds are in `services.scheduler.cache.config.PrivacyProfile`.
    """

    mode: Literal["user_aware", "isolated_pinned", "isolated", "shared", "chunk"] = "user_aware"
    """Prefix cache. user_aware: a prompt that enough users of a tenant have computed is shared within the tenant; other
    prompts stay private. isolated_pinned: only prompts that the operator pinned are shared. isolated: one cache per
    user. shared: one cache for all users, which reveals to each what others have sent: only for users who trust each
    other. chunk: no prefix cache."""
    epoch_seconds: float = Field(default=10.0, gt=0)
    """Length of a cache epoch in seconds. At its end, windows of counters close, and probing has consequences."""
    sharing_seconds: float = Field(default=1.0, gt=0)
    """Time between boundaries at which prompts with enough evidence become shared, in seconds. Ends of epochs are such
    boundaries, too. Shorter: prompts are computed less often before they are shared; users who have computed one, too,
    can tell more precisely when it was shared."""
    eviction: Literal["lru", "lfu", "slru", "priority"] = "lru"
    """Pages to evict first: least recently used (lru), least frequently used (lfu), used only once (slru), or used by
    requests of low priority (priority)."""
    promotion_subjects: int = Field(default=3, ge=1, le=32)
    """Number k of users of a tenant that must have computed a prompt before it is shared within the tenant. A prompt
    is never shared while colluders and victims together are at most k - 1 users (bound B2)."""
    promotion_epochs: int = Field(default=30, ge=0)
    """Epochs within which these users must have computed the prompt; the default is five minutes."""
    share_across_tenants: bool = False
    """Make a prompt public once at least two tenants share it, each on the evidence of its own users, if these tenants
    have chosen global sharing."""
    quota_share: float = Field(default=0.25, gt=0, le=1)
    """Quota of a subject. Above it, its own pages are evicted first, so that a flood does not displace pages of others.
    In the limits file, cache_share sets quotas of single subjects and of tenants, and cache_floor the shares that are
    evicted last."""
    strict_numerics: bool | Literal["auto"] = "auto"
    """Never replace a user's private pages by pages for the same tokens that another user's batch computed: their KV
    may differ in the last bits, which can change an answer. auto: true on GPUs, false on CPUs."""
    decision_log: Path | None = None
    """File to which all decisions of the cache are appended, for `pando cache replay`. It contains all prompts as token
    ids and the users who sent them: it is created readable only by its owner, and grows without bound.
    With it, no pages are read from prefill groups, and layers with a sliding window have no pool of their own. Absent:
    none."""


class ContentCheckSettings(Section):
    """The content check, which can veto that a prompt is shared. It runs in a separate process."""

    enabled: bool = False
    """Share only prompts that the content check has approved; while its process fails, nothing new is shared."""
    detectors: tuple[str, ...] = ("patterns",)
    """Detectors of the content check: patterns (regular expressions), the name of an entry point in the group
    pando.content_detectors, or package.module:factory. A prompt is approved if none of them rejects it."""
    rules: Path | None = None
    """TOML file with the patterns, reloaded when it changes; absent: the patterns that ship with Pando."""


class HostTierSettings(Section):
    """The host tier: copies of KV pages in host memory, and of snapshots of recurrent layers' states."""

    gigabytes: float = Field(default=0.0, ge=0)
    """GiB of host memory per rank for copies of KV pages, of which a model with recurrent layers has half for snapshots
    of their states; 0: no host tier."""
    pages: int | None = Field(default=None, ge=0)
    """Size of the host tier in pages; takes precedence over gigabytes. Snapshots take as much memory beside them."""
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """Pages that are copied to the host: all cached pages (write_through), those used repeatedly
    (write_through_selective), or those about to be evicted from the device (write_back)."""


class StorageSettings(Section):
    """The storage tier: it requires a host tier, and `worker.storage.location` on every rank."""

    prefetch: Literal["off", "best_effort", "timeout", "wait_complete"] = "timeout"
    """Loading of a new prompt's pages from storage. off: they are not loaded. best_effort: they are loaded if that is
    measured to be faster than computing them, but the request does not wait. timeout: the same, and the request waits
    up to half a second. wait_complete: they are loaded even if computing is faster, and the request waits until they
    are; worker.storage.timeout_s bounds the time."""
    min_tokens: int = Field(default=64, ge=1)
    """Smallest number of missing tokens for which storage is read; fewer are computed sooner."""
    megabytes_per_s: float = Field(default=0.0, ge=0)
    """Limit on the read rate from storage, per rank, in MB/s; 0: no limit."""
    write: Literal["backed_up", "off"] = "backed_up"
    """backed_up: pages that are copied to the host, and snapshots of recurrent layers' states, are written to storage
    as well. off: nothing is written."""
    keyring: Path | None = None
    """SQLite file with the random seeds from which names and keys of stored pages are derived; created with mode 0600
    if it does not exist. Schedulers that share a storage must share this file. Without it, no stored page can be read;
    a backup of it makes the pages of forgotten users readable again. Default: pando/keyring.db in $XDG_STATE_HOME or
    ~/.local/state."""
    secret: Annotated[SecretStr | None, AtLeast(32)] = None
    """If set, this secret is required in addition to the keyring to read stored pages; at least 32 characters that
    cannot be guessed."""


class KVEventSettings(Section):
    """KV events over ZeroMQ in vLLM's format, for routers outside of Pando; requires the extra kv-events."""

    endpoint: str | None = None
    """ZeroMQ endpoint on which stored and removed blocks are published, for example tcp://*:5557, by keyed names that
    readers with `fleet.secret` can compute for a prompt. All who can connect can read them, without credentials: they
    see when blocks change, not their text. Absent: none."""
    replay_endpoint: str | None = None
    """ZeroMQ endpoint from which readers fetch the messages that they missed, up to the last 10,000."""
    topic: str = ""
    """Topic of the messages; llm-d expects kv@<address of the pod>@<model>."""

    @model_validator(mode="after")
    def _check_endpoints(self) -> KVEventSettings:
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("scheduler.kv_events.replay_endpoint requires scheduler.kv_events.endpoint")
        return self


class SessionSettings(Section):
    """Pages that sessions may keep between their turns. Shares are of the device's KV pages."""

    limit: int = Field(default=8, ge=0)
    """Sessions that one subject may have open; 0: none."""
    limit_total: int = Field(default=1024, ge=0)
    """Sessions that may be open in total; one tenant may have three quarters of them open."""
    share: float = Field(default=0.125, ge=0, le=1)
    """Share that all sessions of one subject together may hold; also the largest capacity of one session."""
    share_total: float = Field(default=0.5, ge=0, le=0.9)
    """Share that all sessions together may hold; the rest is for running requests. The sessions of one tenant may hold
    three quarters of it."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a turn after which a session ends, unless the client chose another timeout when it opened it: up
    to an hour, or to this value if it is greater."""


class AdapterSettings(Section):
    """Low-rank adapters (LoRA) of the served model."""

    slots: int = Field(default=0, ge=0, le=1024)
    """Adapters that running requests may use at the same time; each takes memory on the device. Others wait in host
    memory. 0: no adapters are served."""
    load: dict[str, str] = Field(default_factory=dict)
    """Adapters to load at start: their names, and directories with adapter_config.json on the workers' hosts, or names
    on the Hugging Face hub."""
    limit: int = Field(default=512, ge=1)
    """Adapters that may be loaded; they are kept in the workers' host memory."""
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the slots that the running requests of one tenant may use, but at least one."""
    experts: bool = False
    """Whether adapters may change experts on GPUs, where experts are then computed by more programs in each pass, for
    requests without adapters, too. On CPUs they always may."""
    manifest: Path | None = None
    """File that lists the loaded adapters, so that they are loaded again if scheduler and workers die together; the
    directory must exist, on a volume that outlasts them. Absent: only `load` is loaded then. `pando up` keeps it in the
    run directory if it is not set."""


class VisionSettings(Section):
    """The vision encoder: how much a step encodes, and what is kept. An image has as many embeddings as tokens."""

    step_embeddings: int = Field(default=1024, ge=1)
    """Embeddings of images that a step with decoding rows may encode; a larger image is the only one of its step. Each
    also counts as a token of max_step_tokens, the limit of other steps. All rows of a step wait for its images, so that
    more would make the gaps between tokens of other requests longer, and fewer would leave a large GPU idle."""
    kept_embeddings: int = Field(default=16_384, ge=0)
    """Embeddings of images that workers keep after they have encoded them, so that a user's image is not encoded again
    for another question about it. They are private to the user, or to the user's cache_salt. Each takes as much memory
    as one hidden state of the model: 117 MB in all for a model of 3,584 components in bfloat16. 0: none are kept."""
    open_bytes: int = Field(default=1024 * 1024 * 1024, ge=64 * 1024 * 1024)
    """Bytes of prepared images that all open requests may have, waiting and running ones; further requests with images
    are refused with a hint when to retry. One user's may take 60 % of it, and one tenant's 75 %. An image of a million
    pixels has about 3 MB."""
    kept_bytes: int | None = Field(default=None, ge=0)
    """Memory for prepared images of the requests of the last five minutes. An image that is sent again, as in each turn
    of a conversation, does not have to come from the tokenizer again; only requests of the same view find it. 0: none
    are kept. Absent: a sixteenth of the memory that is free at the start, from 256 MiB to 4 GiB."""


class SleepSettings(Section):
    """Requests that come while the model sleeps, after `POST /sleep`."""

    wake_on_request: bool = False
    """Whether a request wakes the model; otherwise it waits for `POST /wake_up`."""
    max_waiting_requests: int = Field(default=256, ge=0)
    """Requests that may wait while the model sleeps; further ones are refused with a hint when to retry."""
    timeout_s: float = Field(default=120.0, gt=0, lt=600)
    """Seconds for which a request waits for the model to be woken, with loading; then it is refused with a hint when to
    retry."""


class DeviceTurnSettings(Section):
    """Models that share a device and take turns on it: one of them is awake, the others sleep, and requests wake them.

    `scheduler.sleep` bounds the requests that wait for a turn, and their time.
    """

    enabled: bool = False
    """Whether this model takes turns with others; `pando up --share-device` sets it for all of its models."""
    directory: Path | None = None
    """Directory of lock files by which the models agree whose turn it is: the same one for the schedulers and workers
    of all models of the device, on one host. `pando up` keeps it in the run directory if it is not set."""
    min_turn_s: float = Field(default=5.0, ge=0)
    """Seconds for which a model with requests keeps its turn while other models wait. Then its requests are preempted,
    and continue in its next turn with the same tokens."""
    idle_s: float = Field(default=0.5, ge=0)
    """Seconds without any request after which a model gives up its turn if other models wait."""
    wake_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a model that cannot be woken loses its turn if other models wait."""
    level: int = Field(default=1, ge=1, le=2)
    """Level of sleep between turns. 1: weights are kept in host memory. 2: they are dropped, and read again."""


class QueueSettings(Section):
    """The waiting queue: its order and its length."""

    policy: Literal["fcfs", "lpm", "priority", "fair"] = "fair"
    """Order of the waiting queue. fcfs: by arrival. lpm: longest cached prefix first. priority: by the requests'
    priority. fair: fair shares of tenants, and of subjects within each tenant, by the weights in the limits file;
    running requests are preempted for a tenant or subject that has less than its share, and continue later with the
    same tokens; a subject that waits alone is served in order of arrival."""
    max_waiting_requests: int = Field(default=4096, ge=1)
    """Length of the waiting queue; further requests are refused with a hint when to retry. The limits file can bound
    tenants and subjects (waiting). Otherwise a tenant may have three times as many requests waiting as places are free,
    and a subject as many as its tenant may still add, so that a flood leaves places for others."""
    batch_pause_s: float = Field(default=0.25, ge=0)
    """Seconds without any other request after which lines of batches run. Requests often follow each other, and one
    that arrives while lines run waits for the step under way if that cannot be abandoned. 0: batches use every gap."""


class SpeculationSettings(Section):
    """Speculative decoding: drafts of a row's next tokens, verified in one forward pass. Tokens stay the same."""

    method: Literal["off", "ngram"] = "off"
    """ngram: drafts repeat what followed a request's last tokens earlier in its prompt or output, or in sequences that
    its view holds in the cache, but never in those that other users hold privately. A draft is as long as is expected
    to give the most tokens per second; while passes are limited by computation, there is none. Models with recurrent
    layers have none."""
    num_speculative_tokens: int = Field(default=16, ge=1, le=256)
    """Maximum tokens of a draft."""


class DataParallelSettings(Section):
    """For mixtures: groups that share experts, while each has the attention and the KV of its own requests only.

    Tokens are sent to the ranks that hold their experts, and the outputs come back. Groups have one worker each. If a
    worker dies, the workers of all these groups meet again, and requests go on with the same tokens.
    """

    size: int = Field(default=1, ge=1)
    """Scheduler groups over which the experts are distributed. 1: each group has the whole model. `pando up --dp` sets
    it, and runs as many groups."""
    rank: int = Field(default=0, ge=0)
    """The number of this group among them, from 0."""
    rendezvous: str = "127.0.0.1:29556"
    """host:port at which the workers of these groups connect to each other, served by that of group 0; the same for
    all."""


class AutomaticRoleSettings(Section):
    """Changes of the group's role by the load, between computing prompts for other groups and generating.

    Tokenizers wish them, by the loads of all groups that allow it. Until open requests have ended, the group takes no
    new ones. The last group that generates stays, and so does the last prefill group.
    """

    enabled: bool = False
    """Let the load change the role of this group; it requires a host tier. After a restart, it has scheduler.role
    again. A fleet without prefill groups stays so."""
    interval_s: float = Field(default=60.0, ge=0)
    """Least seconds between two changes of this group."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that open requests have to end before a change; those left then continue beside the group's new work."""


class SchedulerSettings(Section):
    """Rows, steps, KV pages and timeouts of the scheduler."""

    address: str = "127.0.0.1:50052"
    """gRPC address to listen on: host:port or unix:path."""
    role: Literal["both", "prefill", "decode"] = "both"
    """Part of this scheduler group where several serve one model. both: it computes prompts and generates. prefill: it
    only computes prompts for the other groups, which read their KV pages from its workers. decode: it leaves long
    prompts to prefill groups; this requires a host tier, where the pages arrive."""
    prefill_min_tokens: int | None = Field(default=None, ge=16)
    """Smallest number of prompt tokens missing in the cache for which a group asks a prefill group; fewer are computed
    where they are decoded, unless an image is missing. By default measured, between 128 and 4,096 (512 at first): as
    many as the group computes in the time by which asking delays a prompt. A number holds instead."""
    automatic_role: AutomaticRoleSettings = AutomaticRoleSettings()
    workers: Addresses = ("127.0.0.1:50053",)
    """Addresses of the ranks that hold the model together, rank 0 first: by tensor parallelism, all with all layers, or
    by pipeline_parallel stages, the ranks of the first stage first."""
    encoders: Addresses = ()
    """Addresses of workers that only encode images for this group, so that its rows do not wait for encoding: each
    loads the model's vision encoder and nothing else. The group's workers read the embeddings from them, at the same
    addresses. While none of them serves, and without any, the group's workers encode images themselves."""
    rendezvous: str = "127.0.0.1:29555"
    """host:port at which the ranks connect to each other; used with two or more ranks."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages of the pipeline, by which the workers are divided: each has some of the layers, which its workers share by
    tensor parallelism. For models that do not fit on a host, as stages exchange much less than the ranks of a stage.
    Sequences decode in as many micro-batches, so that all stages compute at the same time."""
    expert_parallel: bool = False
    """For mixtures: whether each rank of a stage holds some experts as a whole, instead of some columns of every
    expert. A rank multiplies fewer but larger matrices; all wait for the one whose experts the tokens prefer."""
    data_parallel: DataParallelSettings = DataParallelSettings()
    detokenizer: Addresses = Field(default=("127.0.0.1:50054",), min_length=1)
    """Addresses of the detokenizers, all those that gateways use; dns:host:port stands for all addresses that the host
    name resolves to, which are looked up periodically."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    page_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV page: the unit of matching, sharing and transfer."""
    max_rows: int = Field(default=64, ge=1, le=4096)
    """Sequences that run at the same time; `pando up` sets 256 on GPUs if it is not set."""
    max_step_tokens: int = Field(default=512, ge=16)
    """Tokens of one step, decode and prefill together: small steps keep decode latency even, large ones prefill faster.
    `pando up` sets 4,096 on GPUs if it is not set."""
    mixed_step_tokens: int | None = Field(default=None, ge=16)
    """Prompt tokens in a step that also decodes, to keep decode latency even; more if many wait (mixed_step_share).
    Absent: always as many as fit."""
    mixed_step_share: float = Field(default=0.5, ge=0, le=1)
    """With mixed_step_tokens: share of the prompt tokens that wait which a step with decoding sequences takes at least,
    up to max_step_tokens, so that the queue does not grow. 0: no more than mixed_step_tokens, except for images whose
    tokens belong in one step; decode latency stays even also beside long prompts, whose first tokens come later."""
    device_pages: int | None = Field(default=None, ge=1)
    """KV pages on the device; absent: the worker derives the number from free memory."""
    memory_fraction: float = Field(default=0.85, gt=0, le=1)
    """Share of free memory that the worker may use for weights and KV."""
    max_steps_per_plan: int = Field(default=16, ge=1, le=256)
    """Multi-step decode: upper bound on the steps of one plan while no request waits."""
    late_planning: bool = False
    """Make the plan that follows a pass with prompts of 30 ms or more shortly before this pass ends, instead of when it
    begins, so that requests that arrive meanwhile are in it. On an H200 with an 8B model, this shortened median times
    to first token by 5 % at 12 and 14 requests/s, and not at 8 and 16. Without effect with pipeline_parallel."""
    waiting_timeout_s: float = Field(default=300.0, gt=0, lt=600)
    """Seconds after which a request that has not started fails with a timeout."""
    running_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after its start at which an unfinished request fails with a timeout."""
    worker_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without any result, while plans are in flight, after which the worker group counts as dead."""
    drain_s: float = Field(default=10.0, ge=0)
    """Seconds that open requests have to finish after SIGTERM. Workers that receive it serve as long, until their
    scheduler has ended."""
    admin_token: SecretStr | None = None
    """Callers that send `authorization: Bearer TOKEN` see owners and token ids in state dumps, and may forget users and
    pin prompts; absent: no caller may. When it is set, flush, pause and resume require it, too: gateways need the same
    value to pass administrators' requests on."""
    cache: CacheSettings = CacheSettings()
    content_check: ContentCheckSettings = ContentCheckSettings()
    host_tier: HostTierSettings = HostTierSettings()
    storage: StorageSettings = StorageSettings()
    kv_events: KVEventSettings = KVEventSettings()
    sessions: SessionSettings = SessionSettings()
    queue: QueueSettings = QueueSettings()
    adapters: AdapterSettings = AdapterSettings()
    vision: VisionSettings = VisionSettings()
    sleep: SleepSettings = SleepSettings()
    device_turns: DeviceTurnSettings = DeviceTurnSettings()
    speculation: SpeculationSettings = SpeculationSettings()

    @model_validator(mode="after")
    def _check_role(self) -> SchedulerSettings:
        if self.role == "decode" and not (self.host_tier.gigabytes or self.host_tier.pages):
            raise ValueError("scheduler.role decode requires a host tier: set scheduler.host_tier.gigabytes")
        return self

    @model_validator(mode="after")
    def _check_data_parallel(self) -> SchedulerSettings:
        shared = self.data_parallel
        if shared.rank >= shared.size:
            raise ValueError(f"data_parallel.rank {shared.rank} must be below data_parallel.size {shared.size}")
        if shared.size == 1:
            return self
        obstacles = {
            "workers of several ranks: groups that share experts have one each": len(self.workers) > 1,
            "pipeline_parallel": self.pipeline_parallel > 1,
            "expert_parallel: experts are distributed over the groups already": self.expert_parallel,
            "adapters.slots: adapters of experts on other ranks are not supported": self.adapters.slots > 0,
            "device_turns: a rank that sleeps could not compute its experts for others": self.device_turns.enabled,
        }
        for what, is_set in obstacles.items():
            if is_set:
                raise ValueError(f"scheduler.data_parallel cannot be combined with scheduler.{what}")
        return self
