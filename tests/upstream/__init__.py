"""The SDKs' own tests, over their own stores and over perdure's: `python -m tests.upstream`."""
