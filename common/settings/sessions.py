"""The sessions' part of the scheduler's section of the configuration."""

from __future__ import annotations

from pydantic import Field

from common.settings.storage import StorageSettings


class SessionSettings(StorageSettings):
    """Pages that sessions may keep between their turns. Shares are of the device's KV pages."""

    session_limit: int = Field(default=8, ge=0)
    """Sessions that one subject may have open; 0: none."""
    session_limit_tenant: int = Field(default=768, ge=0)
    """Sessions that one tenant may have open; by default three quarters of session_limit_total, to leave some to
    others."""
    session_limit_total: int = Field(default=1024, ge=0)
    """Sessions that may be open in total."""
    session_share: float = Field(default=0.125, ge=0, le=1)
    """Share that all sessions of one subject together may hold; also the largest capacity of one session."""
    session_share_tenant: float = Field(default=0.375, ge=0, le=1)
    """Share that all sessions of one tenant together may hold; by default three quarters of session_share_total."""
    session_share_total: float = Field(default=0.5, ge=0, le=0.9)
    """Share that all sessions together may hold; the rest is for running requests."""
    session_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a turn after which a session ends, unless the client chose another timeout when it opened it."""
    session_timeout_limit_s: float = Field(default=3600.0, gt=0)
    """Longest timeout, in seconds, that a client may choose for a session."""
