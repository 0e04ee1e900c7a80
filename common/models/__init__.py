"""Where models come from: bundled packages, paths, and the Hugging Face hub."""

from common.models.bundled import BUNDLED_MODELS, BundledModel
from common.models.files import ModelFiles, ModelKind
from common.models.resolving import pin, resolve_model

__all__ = ["BUNDLED_MODELS", "BundledModel", "ModelFiles", "ModelKind", "pin", "resolve_model"]
