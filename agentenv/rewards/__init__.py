"""Rewards as a library: graders of text, their composition, reward models and judges. A failed grader is never a zero.

Each module is imported on its own (`from agentenv.rewards.math import MathGrader`); importing one starts nothing.
"""
