from __future__ import annotations

import pytest

from common.models import resolve_model
from common.tokenization import TextModel, load_text_model


@pytest.fixture(scope="session")
def model() -> TextModel:
    return load_text_model(resolve_model("smollm2-135m-instruct"))
