from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.errors import ConfigurationError
from common.file_locks import is_locked
from common.settings import RpcSettings, Settings, TlsSettings
from common.settings.scheduler import HostTierSettings
from deploy.supervisor import layout as layout_module
from deploy.supervisor.command import read_arguments, read_roles
from deploy.supervisor.layout import PlannedGroup, Replicas, Stage, check_port, free_port, plan_layout

RUN = Path("/run/pando/8000")
# Takes ten ports, or as many neighbours at once, writes them, and has them until its input ends.
TAKE_PORTS = """
import sys
from pathlib import Path
from deploy.supervisor import layout
layout._EPHEMERAL_PORTS, count = Path(sys.argv[1]), int(sys.argv[2])
firsts = [layout.free_port("127.0.0.1", count) for _ in range(10 // count)]
print(*(first + number for first in firsts for number in range(count)), flush=True)
sys.stdin.read()
"""


def settings_with(**sections: dict[str, object]) -> Settings:
    settings = Settings()
    update = {name: getattr(settings, name).model_copy(update=values) for name, values in sections.items()}
    return settings.model_copy(update=update)


def test_every_service_gets_the_addresses_of_its_peers() -> None:
    layout = plan_layout(Settings(), RUN)
    gateway = layout.find("gateway").settings
    scheduler = layout.find("scheduler")
    assert gateway.gateway.tokenizer == (layout.find("tokenizer").address,) == (f"unix:{RUN}/tokenizer.sock",)
    detokenizers = (layout.find("detokenizer").address,)
    assert gateway.gateway.detokenizer == scheduler.settings.scheduler.detokenizer == detokenizers
    assert layout.find("tokenizer").settings.tokenizer.schedulers == (scheduler.address,)
    assert scheduler.settings.scheduler.workers == (layout.find("worker").address,)
    for name in ("tokenizer", "scheduler", "worker", "detokenizer"):
        spec = layout.find(name)
        assert getattr(spec.settings, name).address == spec.address


def test_other_settings_reach_every_service_unchanged() -> None:
    layout = plan_layout(settings_with(scheduler={"max_rows": 7}, worker={"threads": 3}), RUN)
    assert {spec.settings.scheduler.max_rows for spec in layout.services} == {7}
    assert layout.find("worker").settings.worker.threads == 3


def test_ranks_have_their_own_sockets_devices_and_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "available_cores", lambda: 8)
    layout = plan_layout(settings_with(worker={"device_index": 2}), RUN, ranks=2)
    workers = [layout.find(f"worker-{rank}") for rank in range(2)]
    assert layout.find("scheduler").settings.scheduler.workers == tuple(worker.address for worker in workers)
    assert [worker.settings.worker.device_index for worker in workers] == [2, 3]
    assert [worker.settings.worker.threads for worker in workers] == [4, 4]
    assert {worker.group for worker in workers} == {"worker"}


def test_replicas_of_tokenizer_and_detokenizer_are_known_to_their_clients_and_die_alone() -> None:
    settings = settings_with(tokenizer={"metrics_port": 9100}, detokenizer={"metrics_port": 0})
    layout = plan_layout(settings, RUN, replicas=Replicas(tokenizers=3, detokenizers=2))
    tokenizers = [layout.find(f"tokenizer-{number}") for number in range(3)]
    detokenizers = [layout.find(f"detokenizer-{number}") for number in range(2)]
    gateway, scheduler = layout.find("gateway").settings.gateway, layout.find("scheduler").settings.scheduler
    assert gateway.tokenizer == tuple(spec.address for spec in tokenizers)
    assert gateway.detokenizer == scheduler.detokenizer == tuple(spec.address for spec in detokenizers)
    assert [spec.settings.tokenizer.address for spec in tokenizers] == list(gateway.tokenizer)
    assert [spec.settings.tokenizer.metrics_port for spec in tokenizers] == [9100, 9101, 9102]
    assert [spec.settings.detokenizer.metrics_port for spec in detokenizers] == [0, 0]
    assert len({spec.group for spec in layout.services}) == len(layout.services) == 8
    with pytest.raises(ConfigurationError, match="at least 1 tokenizer"):
        plan_layout(settings, RUN, replicas=Replicas(tokenizers=0))


def test_the_worker_starts_first_and_the_gateway_last() -> None:
    services = plan_layout(Settings(), RUN).services
    assert services[0].name == "worker"
    assert services[-1].name == "gateway"
    assert [spec.stage.value for spec in services] == sorted(spec.stage.value for spec in services)
    assert services[-1].stage is Stage.EDGE


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 rank"):
        plan_layout(Settings(), RUN, ranks=0)


def test_a_path_too_long_for_a_socket_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(ConfigurationError, match="--run-directory"):
        plan_layout(Settings(), Path("/tmp") / ("x" * 100))


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8123"), ("::", "http://[::1]:8123"), ("10.0.0.5", "http://10.0.0.5:8123")],
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert plan_layout(settings_with(gateway={"host": host, "port": 8123}), RUN).url == url


def test_a_gateway_that_requires_client_certificates_is_probed_at_a_separate_port() -> None:
    tls = {"certificate": "/tls.crt", "key": "/tls.key"}
    layout = plan_layout(settings_with(gateway={"port": 8123, "tls": TlsSettings.model_validate(tls)}), RUN)
    assert (layout.url, layout.probe_url) == ("https://127.0.0.1:8123", "https://127.0.0.1:8123")
    asking = TlsSettings.model_validate(tls | {"client_authority": "/ca.crt"})
    strict = settings_with(gateway={"port": 8123, "tls": asking})
    with pytest.raises(ConfigurationError, match=r"rpc\.probe_port"):
        plan_layout(strict, RUN)
    layout = plan_layout(strict.model_copy(update={"rpc": RpcSettings(probe_port=9200)}), RUN)
    assert layout.url == "https://127.0.0.1:8123"
    assert layout.probe_url == layout.find("gateway").address == "http://127.0.0.1:9200"


def test_a_taken_port_is_reported_with_the_flag_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="--port"):
            check_port("127.0.0.1", taken.getsockname()[1])


def test_a_free_port_can_be_listened_on() -> None:
    check_port("127.0.0.1", free_port("127.0.0.1"))


@pytest.mark.parametrize("listed", ["30000\t60999\n", "1024 65535", "", None])
def test_free_ports_are_not_those_that_the_system_gives_to_others(
    listed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ports"
    if listed is not None:
        path.write_text(listed, encoding="ascii")
    monkeypatch.setattr(layout_module, "_EPHEMERAL_PORTS", path)
    ports = {free_port("127.0.0.1") for _ in range(50)}
    assert len(ports) > 25
    if listed == "30000\t60999\n":
        assert all(20_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize("neighbours", [1, 2])
def test_processes_side_by_side_get_different_ports(neighbours: int, tmp_path: Path) -> None:
    """Also if their servers start later; those of a process that has ended are given to others again."""
    (tmp_path / "range").write_text("20100 60999", encoding="ascii")
    command = [sys.executable, "-c", TAKE_PORTS, str(tmp_path / "range"), str(neighbours)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def ports_of(count: int) -> list[int]:
        """Return ports that processes take which run at the same time."""
        processes = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        lines = [process.stdout.readline() for process in processes if process.stdout is not None]
        for process in processes:
            process.communicate(timeout=60)
        return [int(port) for line in lines for port in line.split()]

    first, second = ports_of(4), ports_of(4)
    for ports in (first, second):
        assert len(ports) == len(set(ports)) == 40
        assert all(20_000 <= port < 20_100 for port in ports)
    assert set(first) & set(second)


@pytest.fixture
def two_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The two ports that there are below those that the system gives to others; none is reserved."""
    first = free_port("127.0.0.1", 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "range").write_text(f"{first + 2} 65535", encoding="ascii")
    monkeypatch.setattr(layout_module, "_EPHEMERAL_PORTS", tmp_path / "range")
    monkeypatch.setattr(layout_module, "_FIRST_PORT", first)
    return first, first + 1


def test_neighbours_are_all_reserved(two_ports: tuple[int, int], tmp_path: Path) -> None:
    assert free_port("127.0.0.1", 2) == two_ports[0]
    reserved = [int(path.name) for path in tmp_path.glob("pando-ports-*/*") if is_locked(path)]
    assert sorted(reserved) == list(two_ports)
    assert free_port("127.0.0.1") not in two_ports
    assert free_port("127.0.0.1", 2) not in two_ports


@pytest.mark.parametrize("is_reserved", [True, False])
def test_a_port_remains_free_whose_neighbour_is_in_use(
    is_reserved: bool, two_ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or if it is reserved; there are others."""
    first, second = two_ports
    with socket.create_server(("127.0.0.1", second)) if not is_reserved else contextlib.nullcontext():
        if is_reserved:
            with monkeypatch.context() as context:
                context.setattr("secrets.choice", max)
                assert free_port("127.0.0.1") == second
        other = free_port("127.0.0.1", 2)
        assert not {first, second} & {other, other + 1}
        for port in (other, other + 1):
            check_port("127.0.0.1", port)
        assert free_port("127.0.0.1") == first


def test_without_a_directory_of_ones_own_ports_are_free_but_not_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none" / "file"))
    (tmp_path / "none").write_text("", encoding="ascii")
    check_port("127.0.0.1", free_port("127.0.0.1"))


def test_without_any_directory_for_temporary_files_ports_are_free_but_not_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose file system is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    (tmp_path / "range").write_text("30000 60999", encoding="ascii")
    monkeypatch.setattr(layout_module, "_EPHEMERAL_PORTS", tmp_path / "range")
    with pytest.raises(FileNotFoundError):
        tempfile.gettempdir()
    check_port("127.0.0.1", free_port("127.0.0.1"))


def test_an_unknown_service_is_reported_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="tokenizer"):
        plan_layout(Settings(), RUN).find("worker-7")


def test_services_get_as_long_to_end_as_they_may_take_to_drain() -> None:
    layout = plan_layout(settings_with(gateway={"drain_s": 40.0}, scheduler={"drain_s": 20.0}), RUN)
    assert layout.find("gateway").stop_s > 40
    assert layout.find("scheduler").stop_s > 20


def test_each_rank_has_its_own_port_of_metrics() -> None:
    settings = settings_with(worker={"metrics_port": 9093})
    layout = plan_layout(settings, RUN, 2, Replicas(groups=(PlannedGroup(), PlannedGroup())))
    workers = [spec for spec in layout.services if spec.module == "services.worker"]
    assert [spec.settings.worker.metrics_port for spec in workers] == [9093, 9094, 9095, 9096]


def test_groups_of_other_sizes_have_workers_of_their_own() -> None:
    settings = settings_with(worker={"metrics_port": 9093}, scheduler={"host_tier": HostTierSettings(pages=8)})
    groups = read_roles("prefill=1x2,decode=2")
    layout = plan_layout(settings, RUN, 1, Replicas(groups=groups))
    workers = [spec for spec in layout.services if spec.module == "services.worker"]
    assert [spec.name for spec in workers] == ["worker-0-0", "worker-0-1", "worker-1", "worker-2"]
    assert [spec.settings.worker.device_index for spec in workers] == [0, 1, 2, 3]
    assert [spec.settings.worker.metrics_port for spec in workers] == [9093, 9094, 9095, 9096]
    schedulers = [spec.settings.scheduler for spec in layout.services if spec.module == "services.scheduler"]
    assert [(each.role, len(each.workers)) for each in schedulers] == [("prefill", 2), ("decode", 1), ("decode", 1)]


def test_ranks_of_groups_count_per_stage() -> None:
    settings = settings_with(scheduler={"host_tier": HostTierSettings(pages=8), "pipeline_parallel": 2})
    layout = plan_layout(settings, RUN, 1, Replicas(groups=read_roles("both=1x2,decode=1")))
    schedulers = [spec.settings.scheduler for spec in layout.services if spec.module == "services.scheduler"]
    assert [len(each.workers) for each in schedulers] == [4, 2]


@pytest.mark.parametrize("roles", ["prefill=1x2,decode=1", "prefill=1,both=1x2"])
def test_groups_of_stages_that_prefill_for_ones_of_other_sizes_are_refused(roles: str) -> None:
    """Their pages could never be read, so each prompt would be computed where it is decoded, with a warning."""
    settings = settings_with(scheduler={"host_tier": HostTierSettings(pages=8), "pipeline_parallel": 2})
    with pytest.raises(ConfigurationError, match="as many ranks, not 2 and 4"):
        plan_layout(settings, RUN, 1, Replicas(groups=read_roles(roles)))
    layout = plan_layout(settings, RUN, 2, Replicas(groups=read_roles("prefill=1x2,decode=1")))
    schedulers = [spec.settings.scheduler for spec in layout.services if spec.module == "services.scheduler"]
    assert [len(each.workers) for each in schedulers] == [4, 4]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_that_share_experts_meet_in_one_place_and_on_gpus_restart_together(device: str) -> None:
    settings, arguments = read_arguments(["--dp", "2", "--worker.device", device])
    layout = plan_layout(settings, RUN, 1, Replicas(groups=arguments.roles))
    schedulers = [spec.settings.scheduler for spec in layout.services if spec.module == "services.scheduler"]
    assert [(each.data_parallel.size, each.data_parallel.rank) for each in schedulers] == [(2, 0), (2, 1)]
    assert len({each.data_parallel.rendezvous for each in schedulers}) == 1
    assert [len(each.workers) for each in schedulers] == [1, 1]
    workers = [spec for spec in layout.services if spec.module == "services.worker"]
    assert [spec.name for spec in workers] == ["worker-0", "worker-1"]
    assert len({spec.group for spec in workers}) == (1 if device == "cuda" else 2)
    assert {spec.group for spec in workers}.isdisjoint(spec.group for spec in layout.services if spec not in workers)
    assert [spec.settings.worker.device_index for spec in workers] == [0, 1]


def test_groups_that_share_experts_may_have_roles() -> None:
    arguments = ["--dp", "2", "--roles", "prefill=1,decode=1", "--scheduler.host_tier.pages", "8"]
    settings, own = read_arguments(arguments)
    layout = plan_layout(settings, RUN, 1, Replicas(groups=own.roles))
    schedulers = [spec.settings.scheduler for spec in layout.services if spec.module == "services.scheduler"]
    assert [(each.role, each.data_parallel.rank) for each in schedulers] == [("prefill", 0), ("decode", 1)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--dp", "0"], "--dp: experts are distributed over at least 1 group, not 0"),
        (["--dp", "2", "--tp", "2"], "leave out --tp and --pp"),
        (["--dp", "2", "--pp", "2"], "leave out --tp and --pp"),
        (["--dp", "2", "--roles", "both=3"], "there are 3 scheduler groups"),
        (["--scheduler.data_parallel.size", "2"], "add --dp 2"),
        (["--dp", "2", "--expert-parallel"], "^scheduler.data_parallel cannot be combined with scheduler.expert"),
        (["--dp", "2", "--scheduler.adapters.slots", "2"], "scheduler.adapters.slots"),
    ],
)
def test_groups_that_cannot_share_experts_are_refused_by_name(arguments: list[str], named: str) -> None:
    def lay_out() -> None:
        settings, own = read_arguments(arguments)
        plan_layout(settings, RUN, own.tp, Replicas(groups=own.roles))

    with pytest.raises(ConfigurationError, match=named):
        lay_out()


@pytest.mark.parametrize("text", ["prefill=x2", "prefill=1x0", "prefill=1x", "reader=1", "prefill=1,", "both=-1"])
def test_roles_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="ROLE=NUMBER"):
        read_roles(text)


def test_encoders_are_workers_that_their_own_scheduler_knows() -> None:
    settings = settings_with()
    layout = plan_layout(settings, RUN, 2, Replicas(groups=(PlannedGroup(), PlannedGroup()), encoders=1))
    assert layout.find("encoder-1").module == "services.worker"
    assert layout.find("encoder-1").settings.worker.address == f"unix:{RUN}/encoder-1.sock"
    for number in range(2):
        scheduler = layout.find(f"scheduler-{number}").settings.scheduler
        assert scheduler.encoders == (f"unix:{RUN}/encoder-{number}.sock",)
        assert len(scheduler.workers) == 2
    ranks = [spec.settings.worker for spec in layout.services if spec.module == "services.worker"]
    assert [each.device_index for each in ranks] == list(range(6)), "each has a device of its own"
    assert not any(spec.settings.scheduler.encoders for spec in plan_layout(settings, RUN).services)
    with pytest.raises(ConfigurationError):
        plan_layout(settings, RUN, replicas=Replicas(encoders=-1))
