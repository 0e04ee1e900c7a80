"""The certificates that deploy/RECIPES.md makes by hand work, each for its role."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc.channel import open_channel
from common.rpc.roles import CALLERS, Role
from common.rpc.security import read_security
from common.rpc.server import RpcServer
from common.settings import RpcSettings

PAGE = Path(__file__).resolve().parents[2] / "deploy" / "RECIPES.md"
METHOD = "/pando.v1.Operations/SetLogLevel"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory in which the page's script has run."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    [script] = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    return tmp_path


async def test_certificates_made_by_hand_have_their_roles(made: Path) -> None:
    def settings(role: Role) -> RpcSettings:
        files = {"certificate": "tls.crt", "key": "tls.key", "authority": "ca.crt"}
        return RpcSettings.model_validate({name: made / role / file for name, file in files.items()})

    server = RpcServer("pando.v1.Worker", "127.0.0.1:0", read_security(settings(Role.WORKER)))
    await server.start()
    codes = {}
    for role in Role:
        async with open_channel(f"127.0.0.1:{server.port}", read_security(settings(role)), "worker") as channel:
            call: Any = channel.unary_unary(METHOD)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(b"", timeout=30)
            codes[role] = failed.value.code()
    await server.stop(0)
    # An empty request has no level.
    accepted = {role for role, code in codes.items() if code is grpc.StatusCode.INVALID_ARGUMENT}
    refused = {role for role, code in codes.items() if code is grpc.StatusCode.PERMISSION_DENIED}
    assert accepted == CALLERS["pando.v1.Worker"][METHOD] == {Role.OPERATOR}
    assert refused == set(Role) - accepted
