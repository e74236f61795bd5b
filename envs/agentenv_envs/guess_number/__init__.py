"""guess_number: find a hidden number with a few guesses and the hint after each."""

from agentenv_envs.guess_number.env import GuessNumber

__all__ = ["GuessNumber"]
