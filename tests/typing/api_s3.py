"""The S3 store, as users would make and use it."""

from __future__ import annotations

from typing import assert_type

import perdure
from perdure.stores import S3Store

store = S3Store(
    "my-bucket",
    "agents",
    endpoint="https://s3.example.org",
    region="eu-central-1",
    timeout=10.0,
    credentials={"access_key_id": "…", "secret_access_key": "…"},
    owner="worker-1",
)
assert_type(store.location, str)
assert_type(S3Store.at("s3://my-bucket/agents?region=eu-central-1"), S3Store)
sessions: perdure.SessionManager = perdure.connect(store)
