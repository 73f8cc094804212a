"""A kernel that has nothing yet: the cells await at the top level."""
