"""Tokenization for one model: vocabulary, chat templates and limits, without the weights."""

from common.tokenization.text_model import TextModel, load_served_model, load_text_model, served_traits

__all__ = ["TextModel", "load_served_model", "load_text_model", "served_traits"]
