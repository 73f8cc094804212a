"""A cloud's service gives tokens that expire; the snippet's store is made and not opened."""


async def new_token() -> str:
    return "a-token"
