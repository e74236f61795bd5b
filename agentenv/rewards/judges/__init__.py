"""Who is asked for a verdict, and how: clients, a cache and accounting below `judge.Judge`, rewards above it.

`openai.py` and `engine.py` are judges; `cache.py` puts a memory before one; `usage.py` counts what they cost. What they
are asked is in `templates.py`; `pointwise.py`, `rubric.py`, `pairwise.py` and `listwise.py` ask it, `voting.py` several
times where that is wanted, and `draws.py` tells those times apart. What went wrong has a class in `failures.py`.
"""
