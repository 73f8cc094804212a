async def ask_model(messages):
    yield "Hello"
