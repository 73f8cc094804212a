"""Memory of an agent: the working context, working memory, and long-term items."""
