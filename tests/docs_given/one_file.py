"""The example's store, with the page's step in the place of its own: one holder at a time."""

from pathlib import Path

from examples import own_backend
from perdure import LeaseHeldError, Message, connect, store

globals().update({name: value for name, value in vars(own_backend).items() if name[:2] != "__"})
Held = store.Held


async def after():
    own_backend.OneFileStore.acquire = globals()["acquire"]
    one, other = (own_backend.OneFileStore(Path("one.json")) for _ in range(2))
    async with connect(one) as sessions, connect(other) as others:
        async with sessions.open("ada") as session, session.turn():
            session.append(Message.user("Hello"))
            try:
                await others.open("ada", on_held="raise")
            except LeaseHeldError:
                return
            raise AssertionError("there were two holders")
