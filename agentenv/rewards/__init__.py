"""Rewards as a library: graders of text, their composition, reward models and judges. A failed grader is never a zero.

Import each module by its own path (`from agentenv.rewards.rules.math.reward import MathGrader`); importing one starts
nothing. `registry.py` lists all rewards and says how to add one.
"""
