"""The messages of a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field

HistoryMessage = dict[str, str]


@dataclass(slots=True)
class ChatHistory:
    """The messages of one chat, in the API's format."""

    system: str | None = None
    turns: list[HistoryMessage] = field(default_factory=list)

    def ask(self, text: str) -> list[HistoryMessage]:
        """Add a message of the user; return all messages to send."""
        self.turns.append({"role": "user", "content": text})
        return self.messages

    def answer(self, text: str) -> None:
        """Add the model's answer. If it is empty, the user's message is removed, so that it can be sent again."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        elif self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def reset(self) -> None:
        """Remove all messages except the system prompt."""
        self.turns.clear()

    @property
    def messages(self) -> list[HistoryMessage]:
        """All messages, the system prompt first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns
