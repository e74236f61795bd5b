"""Language models that judge: who is asked for a verdict, how, and the rewards that ask.

`openai.py` and `engine.py` are judges; `cache.py` puts a memory before one; `usage.py` counts what they cost, and
`settings.py` makes them of JSON. One class for each kind of judging asks them: `pointwise.JudgeReward` (yes or no) and
`PointwiseReward` (a score), `rubric.RubricReward`, `pairwise.PairwiseJudge` for tournaments, `listwise.ListwiseReward`
for groups. What they ask is in `templates.py`, what they read from a reply in `verdicts.py`, how often and how long
in `asking.py`; `draws.py` tells votes and attempts apart. What went wrong has a class in `failures.py`.
"""
