"""Language models that judge, and the rewards that ask them.

`openai.py` is a judge; `cache.py` caches the replies of one; `usage.py` counts what they cost, and
`settings.py` makes them from JSON. One class per kind of judging asks them: `pointwise.JudgeReward` (yes or no) and
`PointwiseReward` (a score), `rubric.RubricReward`, `pairwise.PairwiseJudge` for tournaments, `listwise.ListwiseReward`
for groups. `templates.py` has their prompts, `verdicts.py` reads replies, `voting.py` retries and combines votes,
`protocol.py` tells votes and attempts apart, and has a class for each reason why a verdict is missing.
"""
