"""The same place again and again, as several processes would have it."""

from tests.session.conftest import again, place

__all__ = ["again", "place"]
