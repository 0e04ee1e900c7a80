"""Adapters at the gateway: their names in requests, who may use them, and their administration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.adapters import AdapterInfo
from gateway.identity.keys import ApiKey, hash_of, load_keys, save_keys
from gateway.pipeline.port import LoadedAdapter
from tests.fakes.pipeline import says
from tests.gateway.support import HELLO, FakedGateway, error_of, faked

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = '[tenants.acme]\nadapters = ["sql", "team-*"]\n'
KEYS = {
    "admin": ApiKey("admin", hash_of("admin"), "operators", admin=True),
    "acme": ApiKey("acme", hash_of("acme"), "acme"),
    "narrow": ApiKey("narrow", hash_of("narrow"), "acme", adapters=("team-a",)),
    "other": ApiKey("other", hash_of("other"), "globex"),
}
WAYS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/generate": {"text": "Hello"},
}


@pytest.fixture
def gateway(tmp_path: Path) -> FakedGateway:
    (tmp_path / "limits.toml").write_text(LIMITS)
    save_keys(tmp_path / "keys.toml", KEYS.values())
    aliases = {"our-sql": "tiny:sql"}
    made = faked(
        says("x"), limits_file=tmp_path / "limits.toml", keys_file=tmp_path / "keys.toml", adapter_aliases=aliases
    )
    for name in ("sql", "team-a", "secret"):
        made.administration.loaded[name] = LoadedAdapter(AdapterInfo(name, f"/{name}", "d1ge57"))
    return made


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(gateway: FakedGateway, key: str, path: str = "/v1/completions", **fields: Any) -> Any:
    return await gateway.post(path, {**WAYS[path], **fields}, of(key))


def used(gateway: FakedGateway) -> tuple[str, str]:
    """Return the model and the adapter of the last request."""
    request = gateway.pipeline.submitted[-1]
    return request.model, request.options.adapter


@pytest.mark.parametrize("path", WAYS)
async def test_every_endpoint_that_generates_takes_adapters(gateway: FakedGateway, path: str) -> None:
    response = await ask(gateway, "acme", path, model="tiny:sql")
    assert response.status_code == 200, response.text
    assert used(gateway) == ("tiny", "sql")
    if path != "/generate":
        assert response.json()["model"] == "tiny:sql"


async def test_an_adapter_has_several_names(gateway: FakedGateway) -> None:
    for fields in ({"model": "our-sql"}, {"model": "tiny", "lora_path": "sql"}, {"model": "tiny:sql"}):
        assert (await ask(gateway, "acme", **fields)).status_code == 200
        assert used(gateway) == ("tiny", "sql")
    assert (await ask(gateway, "acme", model="tiny")).status_code == 200
    assert used(gateway) == ("tiny", "")
    refused = await ask(gateway, "acme", model="tiny:sql", lora_path="team-a")
    assert error_of(refused, 400)["param"] == "lora_path"
    for field, value in (("lora_path", "\0"), ("model", "tiny:s\0")):
        error = error_of(await ask(gateway, "acme", **{"model": "tiny", field: value}), 400)
        assert error["param"] == field
        assert f"'{field}' must not contain control characters" in error["message"]


@pytest.mark.parametrize(
    ("key", "usable"),
    [("acme", {"sql", "team-a", "team-b"}), ("narrow", {"team-a"}), ("other", set()), ("admin", {"sql", "secret"})],
)
async def test_a_credential_has_the_adapters_of_its_own_list_or_its_tenants(
    gateway: FakedGateway, key: str, usable: set[str]
) -> None:
    served = []
    for adapter in ("sql", "team-a", "team-b", "secret"):
        response = await ask(gateway, key, model=f"tiny:{adapter}")
        if adapter in usable or key == "admin":
            assert response.status_code == 200
            served.append(adapter)
        else:
            error_of(response, 404)
    # What is refused reaches no scheduler, and so is no evidence for the adapter.
    assert [request.options.adapter for request in gateway.pipeline.submitted] == served


@pytest.mark.parametrize("key", ["acme", "other"])
async def test_what_a_caller_may_not_use_is_refused_as_a_name_that_does_not_exist(
    gateway: FakedGateway, key: str
) -> None:
    for name in ("secret", "absent"):
        by_name = error_of(await ask(gateway, key, model=f"tiny:{name}"), 404)
        by_field = error_of(await ask(gateway, key, model="tiny", lora_path=name), 404)
        unknown = error_of(await ask(gateway, key, model=f"tin:{name}"), 404)
        assert by_name == by_field
        assert {**by_name, "message": by_name["message"].replace("tiny:", "tin:")} == unknown
    # No service was asked.
    assert gateway.pipeline.submitted == []
    assert gateway.administration.listings == 0


async def test_lists_of_models_have_what_the_caller_may_use(gateway: FakedGateway) -> None:
    async def listed(key: str) -> list[str]:
        models = (await gateway.get("/v1/models", of(key))).json()["data"]
        return [model["id"] for model in models]

    assert await listed("other") == ["tiny"]
    assert gateway.administration.listings == 0
    assert await listed("acme") == ["tiny", "tiny:sql", "tiny:team-a"]
    assert await listed("narrow") == ["tiny", "tiny:team-a"]
    found = (await gateway.get("/v1/models/tiny:sql", of("acme"))).json()
    assert (found["id"], found["parent"]) == ("tiny:sql", "tiny")
    for key, name in (("other", "sql"), ("acme", "team-b")):
        error_of(await gateway.get(f"/v1/models/tiny:{name}", of(key)), 404)


async def test_administrators_load_pin_and_unload(gateway: FakedGateway) -> None:
    loaded = await gateway.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/new"}, of("admin"))
    assert loaded.json()["adapter"]["lora_path"] == "/new"
    assert gateway.administration.loaded["new"].info.source == "/new"
    pinned = await gateway.post("/v1/load_lora_adapter", {"lora_name": "new", "pinned": True}, of("admin"))
    assert pinned.json()["adapter"]["pinned"] is True
    names = [each["lora_name"] for each in (await gateway.get("/v1/lora_adapters", of("admin"))).json()["data"]]
    assert names == ["sql", "team-a", "secret", "new"]
    for status in (200, 404):
        response = await gateway.post("/v1/unload_lora_adapter", {"lora_name": "new"}, of("admin"))
        assert response.status_code == status
    for body in ({"lora_name": "a:b", "lora_path": "/x"}, {"lora_name": "", "lora_path": "/x"}, {"lora_name": "x"}):
        error_of(await gateway.post("/v1/load_lora_adapter", body, of("admin")), 400)
    wrong = await gateway.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "wrong"}, of("admin"))
    assert error_of(wrong, 400)["param"] == "lora_path"


def test_keys_keep_their_adapters(tmp_path: Path) -> None:
    save_keys(tmp_path / "keys.toml", KEYS.values())
    assert load_keys(tmp_path / "keys.toml") == list(KEYS.values())
