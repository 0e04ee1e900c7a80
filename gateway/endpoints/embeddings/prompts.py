"""Prompts of embedding models, which are put before a text according to its use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from gateway.pipeline.port import ModelInfo

QUERY, DOCUMENT = "query", "document"
# Names that prompts for a use have in models, in order of precedence; keys are those that clients of Cohere, Jina and
# NVIDIA send.
_NAMES: Final = {
    QUERY: (QUERY, "search_query", "retrieval.query"),
    "search_query": (QUERY, "search_query", "retrieval.query"),
    "retrieval.query": ("retrieval.query", QUERY, "search_query"),
    DOCUMENT: (DOCUMENT, "passage", "search_document", "retrieval.passage"),
    "passage": ("passage", DOCUMENT, "search_document", "retrieval.passage"),
    "search_document": ("search_document", DOCUMENT, "passage", "retrieval.passage"),
    "retrieval.passage": ("retrieval.passage", "passage", DOCUMENT, "search_document"),
    "separation": ("separation", "clustering"),
}


def prompt_of(card: ModelInfo, name: str | None, use: str | None = None) -> str:
    """Return the prompt called `name`, that of a use, or the model's default; empty if it has none for the use.

    Raises:
        InvalidRequestError: the model has no prompt of this name.
    """
    if name is not None:
        if name not in card.prompts:
            known = ", ".join(f"'{each}'" for each in card.prompts) or "none"
            message = f"The model '{card.name}' has no prompt '{name[:100]}'; its prompts: {known}."
            raise InvalidRequestError(message, param="prompt_name")
        return card.prompts[name]
    if use is not None:
        names = _NAMES.get(use, (use,))
        return next((card.prompts[each] for each in names if each in card.prompts), "")
    return card.prompts[card.default_prompt] if card.default_prompt else ""
