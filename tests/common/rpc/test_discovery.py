"""Where servers are."""

from __future__ import annotations

from common.rpc.discovery import Discovery, Found, resolve_name

NAME = "schedulers.llm.svc"


class Names:
    """A name service whose answers change."""

    def __init__(self) -> None:
        self.answer: list[str] | OSError = []

    async def resolve(self, host: str, port: int) -> list[str]:
        assert (host, port) == (NAME, 50052)
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


async def test_static_addresses_are_taken_as_they_are() -> None:
    found = await Discovery(["a:1", "unix:/run/b.sock", "a:1"]).look()
    assert found == (Found("a:1"), Found("unix:/run/b.sock"))


async def test_a_name_resolves_to_all_its_current_addresses() -> None:
    names = Names()
    discovery = Discovery(["static:1", f"dns:{NAME}:50052"], names.resolve)
    names.answer = ["10.0.0.2:50052", "10.0.0.1:50052"]
    assert await discovery.look() == (Found("static:1"), Found("10.0.0.1:50052", NAME), Found("10.0.0.2:50052", NAME))
    names.answer = ["10.0.0.3:50052"]
    assert await discovery.look() == (Found("static:1"), Found("10.0.0.3:50052", NAME))


async def test_known_addresses_are_kept_while_the_name_service_fails() -> None:
    names = Names()
    discovery = Discovery([f"dns:{NAME}:50052"], names.resolve)
    names.answer = ["10.0.0.1:50052"]
    await discovery.look()
    names.answer = OSError("no answer")
    assert await discovery.look() == (Found("10.0.0.1:50052", NAME),)


async def test_a_real_name_is_resolved() -> None:
    assert "127.0.0.1:50052" in await resolve_name("localhost", 50052)
