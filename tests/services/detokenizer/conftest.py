from __future__ import annotations

import pytest

from common.models import resolve_model
from common.tokenization import TextModel, load_text_model
from services.detokenizer.decoding import DecoderFactory


@pytest.fixture(scope="session")
def model() -> TextModel:
    return load_text_model(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def decoders(model: TextModel) -> DecoderFactory:
    return DecoderFactory(model)
