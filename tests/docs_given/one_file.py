"""The example's store, with the page's step in the place of its own."""

from pathlib import Path

from perdure import Message, connect


async def after():
    from examples.own_backend import OneFileStore

    OneFileStore.ack = ack
    store = OneFileStore(Path("one.json"))
    async with connect(store) as sessions:
        await sessions.post("ada", Message.user("Hello"))
        assert len(await store.sessions_with_pending_items()) == 1
        async with sessions.open("ada") as session:
            assert [message.text for message in session.context()] == ["Hello"]
    assert await store.sessions_with_pending_items() == []  # by now it is acknowledged
