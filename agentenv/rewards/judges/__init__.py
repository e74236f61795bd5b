"""Language models that judge, and the rewards that ask them.

`openai.py` has the judge, and the cache of its replies; `asking.py` makes it from JSON, retries and combines votes;
`protocol.py` tells replies to one question apart, counts what they cost, and has a class for each reason why a verdict
is missing.
One class per kind of judging asks it: `pointwise.JudgeReward` (yes or no), `PointwiseReward` (a score) and
`RubricReward` (criteria), `comparisons.PairwiseJudge` for tournaments, `comparisons.ListwiseReward` for groups.
`templates.py` has their prompts, and reads the verdicts of replies.
"""
