"""The part of the scheduler's section that is about open sessions."""

from __future__ import annotations

from pydantic import Field

from common.settings.storage import StorageSettings


class SessionSettings(StorageSettings):
    """What sessions may keep between their turns. Shares are of the device's KV pages."""

    session_limit: int = Field(default=8, ge=0)
    """Sessions that one subject may have open; 0: none."""
    session_limit_tenant: int = Field(default=768, ge=0)
    """Sessions that one tenant may have open: three quarters of all, so that others can open some beside it."""
    session_limit_total: int = Field(default=1024, ge=0)
    """Sessions that may be open in all."""
    session_share: float = Field(default=0.125, ge=0, le=1)
    """So much may all sessions of one subject hold; also the most that one session may ask for."""
    session_share_tenant: float = Field(default=0.375, ge=0, le=1)
    """So much may all sessions of one tenant hold: three quarters of what all may."""
    session_share_total: float = Field(default=0.5, ge=0, le=0.9)
    """So much may all sessions hold together; the rest is for what runs."""
    session_timeout_s: float = Field(default=600.0, gt=0)
    """A session ends when it has had no turn for so long, unless its opener said otherwise,"""
    session_timeout_limit_s: float = Field(default=3600.0, gt=0)
    """which may be up to so long."""
