"""The README's eight lines: a conversation that is still there when you run it again."""

import asyncio

import perdure
from perdure import Message


async def main() -> None:
    async with perdure.connect() as sessions, sessions.open("my-assistant") as session:
        async with session.turn():
            session.append(Message.user("Hello"))
            known = len(session.context()) - 1
            session.append(Message.assistant(f"Hello! I remember {known} earlier messages."))
        print(session.context()[-1].text)


asyncio.run(main())
