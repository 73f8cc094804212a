"""What an agent remembers: the working context, working memory, and long-term items."""
