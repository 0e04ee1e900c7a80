"""How `pando state` and `pando cache` connect: with the services' own certificates and token, or not at all."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from common.rpc.security import TOKEN_KEY
from deploy.cli import main
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from tests.fakes.certificates import Authority, Identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "a-secret-of-all-services"
NAME = "scheduler.llm.svc"


class Pipeline(scheduler_pb2_grpc.SchedulerServicer, tokenizer_pb2_grpc.TokenizerServicer):  # type: ignore[misc]  # both have Submit
    """Keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str | bytes]] = []

    def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        self.shown.append(dict(context.invocation_metadata()))
        return scheduler_pb2.GetStateResponse(worker_group="READY")

    def Pin(self, request: scheduler_pb2.PinRequest, context: grpc.ServicerContext) -> scheduler_pb2.PinResponse:
        return scheduler_pb2.PinResponse(pinned_tokens=len(request.token_ids))

    def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        self.shown.append(dict(context.invocation_metadata()))
        return tokenizer_pb2.TokenizeResponse(ids=map(ord, request.text))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def served(authority: Authority) -> Iterator[tuple[Pipeline, str]]:
    """A scheduler and tokenizer at one port, which ask for certificates and have one for NAME."""
    own = authority.issue("scheduler", hosts=[NAME])
    credentials = grpc.ssl_server_credentials(
        [(own.key.read_bytes(), own.certificate.read_bytes())], own.authority.read_bytes(), True
    )
    pipeline = Pipeline()  # type: ignore[abstract]  # the generated base answers what it doesn't
    server = grpc.server(futures.ThreadPoolExecutor(2))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(pipeline, server)
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(pipeline, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield pipeline, f"127.0.0.1:{port}"
    server.stop(None).wait()


def settings_of(identity: Identity, path: Path) -> Path:
    text = f'certificate = "{identity.certificate}"\nkey = "{identity.key}"\nauthority = "{identity.authority}"\n'
    path.write_text(f'[rpc]\n{text}token = "{TOKEN}"\n')
    return path


def test_settings_of_the_services_open_their_ports(
    served: tuple[Pipeline, str], authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline, address = served
    config = settings_of(authority.issue("operator"), tmp_path / "pando.toml")
    assert main(["state", "--scheduler", address, "--server-name", NAME, "--config", str(config)]) == 0
    assert "READY" in capsys.readouterr().out
    assert pipeline.shown[0][TOKEN_KEY] == TOKEN
    # The address has another name than the certificate.
    assert main(["state", "--scheduler", address, "--config", str(config)]) == 1


def test_credentials_from_the_environment_work_for_scheduler_and_tokenizer(
    served: tuple[Pipeline, str], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, address = served
    identity = authority.issue("operator")
    for name in ("certificate", "key", "authority"):
        monkeypatch.setenv(f"PANDO_RPC__{name.upper()}", str(getattr(identity, name)))
    monkeypatch.setenv("PANDO_RPC__TOKEN", TOKEN)
    places = ["--scheduler", address, "--tokenizer", address, "--server-name", NAME]
    assert main(["cache", "pin", "--text", "Be kind.", *places]) == 0
    assert [shown[TOKEN_KEY] for shown in pipeline.shown] == [TOKEN, TOKEN]


@pytest.mark.parametrize("who", ["stranger", "expired", "plaintext"])
def test_commands_without_a_valid_certificate_are_refused(
    served: tuple[Pipeline, str], authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str], who: str
) -> None:
    flags = ["--plaintext"]
    if who != "plaintext":
        other = Authority(tmp_path / "other", "somebody").issue("guest", believes=authority.path)
        identity = other if who == "stranger" else authority.issue("late", expired=True)
        flags = ["--config", str(settings_of(identity, tmp_path / "pando.toml"))]
    assert main(["state", "--scheduler", served[1], "--server-name", NAME, *flags]) == 1
    assert served[1] in capsys.readouterr().err
    assert not served[0].shown


def test_without_certificates_tcp_is_not_even_tried(
    served: tuple[Pipeline, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["state", "--scheduler", served[1]]) == 2
    assert "rpc.certificate" in capsys.readouterr().err
