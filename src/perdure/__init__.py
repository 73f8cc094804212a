"""perdure keeps the state of long-running asynchronous agents."""
