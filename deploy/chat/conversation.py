"""What has been said so far."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """The messages of one chat, as the API takes them."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def ask(self, text: str) -> list[Message]:
        """Add what the user says; return all messages to send."""
        self.turns.append({"role": "user", "content": text})
        return self.messages

    def answer(self, text: str) -> None:
        """Add what the model said. A turn that brought nothing is taken back, so that it can be asked again."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        elif self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.turns.clear()

    @property
    def messages(self) -> list[Message]:
        """Everything, the system prompt first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns
