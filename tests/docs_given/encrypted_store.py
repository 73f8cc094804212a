"""Nothing to give: what the snippet makes is opened and read back."""


async def after():
    import perdure

    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        session.append(perdure.Message.user("Hello"))
