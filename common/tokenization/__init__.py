"""What turns text into token ids and back: vocabulary, chat templates and limits of one model, without its weights."""

from common.tokenization.text_model import TextModel, load_served_model, load_text_model

__all__ = ["TextModel", "load_served_model", "load_text_model"]
