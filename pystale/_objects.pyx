# cython: language_level=3, boundscheck=False, wraparound=False, autotestdict=False
"""Python lists and rollout objects, walked in place."""
