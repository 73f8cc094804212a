"""Who may write a session, decided from what a store reports."""
