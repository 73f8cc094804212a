"""The example's bucket, with the page's step in the place of its own: it keeps a greeting."""

from pathlib import Path

from examples import own_bucket
from perdure import Message, connect

globals().update({name: value for name, value in vars(own_bucket).items() if name[:2] != "__"})


async def after():
    example, step = own_bucket.TableBucket, dict(globals())
    if step["TableBucket"] is not example:  # the class, as far as it is written in its step
        step.update(vars(step["TableBucket"]))
    for name in vars(example):
        if callable(step.get(name)):
            setattr(example, name, step[name])
    async with connect(step["table_store"](Path("bucket.db"))) as sessions:
        async with sessions.open("ada") as session, session.turn():
            session.append(Message.user("Hello"))
        view = await sessions.load("ada")
        assert [message.text for message in view.context()] == ["Hello"]
