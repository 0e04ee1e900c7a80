from __future__ import annotations

import pytest

from common.models import resolve_model
from common.tokenization import TextModel, load_text_model
from tests.common.tokenization.transformers_oracle import OracleTokenizer, load_bundled


@pytest.fixture(scope="session")
def bundled() -> TextModel:
    return load_text_model(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def oracle() -> OracleTokenizer:
    return load_bundled()
