"""A live asynchronous run on a laptop: `pystale demo`.

A small policy learns to count by GRPO while its responses are cut short by weight syncs, continued under new weights,
aged, masked and re-rolled. The model, the task and the engine live here; everything about staleness is the library.
"""
