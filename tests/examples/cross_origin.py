"""The chat server for pages of another site: the line of docs/asgi.md."""

from __future__ import annotations

import os

from chat_server import app
from fastapi.middleware.cors import CORSMiddleware

__all__ = ["app"]

app.add_middleware(
    CORSMiddleware,
    allow_origins=[os.environ["CHAT_PAGES"]],
    allow_methods=["GET", "POST"],
    allow_headers=["authorization", "content-type", "idempotency-key", "last-event-id"],
)
