"""JSON schemas of every kind that outputs can be held to, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("corpus.json").read_text(encoding="utf-8"))
