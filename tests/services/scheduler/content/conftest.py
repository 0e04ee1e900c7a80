from __future__ import annotations

import pytest

from common.models import resolve
from common.tokenization import TextModel, load_text_model


@pytest.fixture(scope="session")
def model() -> TextModel:
    return load_text_model(resolve("smollm2-135m-instruct"))
