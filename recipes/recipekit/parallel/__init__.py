"""Who holds what: the cut of every tensor, the groups of ranks, and the four ways to divide a
model.
"""
