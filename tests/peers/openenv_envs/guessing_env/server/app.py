"""Guess a number of two digits. It has one session at a time, OpenEnv's default."""

import random

import numpy as np
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

CRASHES, UNPAID, CUT = 666, 777, 888
"""Guesses on which the server fails, ends without a reward, or is cut short."""


class Guess(Action):
    """A guess."""

    number: int


class Hint(Observation):
    """What follows a guess."""

    text: str
    noise: float


class Guessing(Environment):
    """The number is drawn in the constructor, from numpy's global generator."""

    def __init__(self):
        super().__init__()
        self.number = int(np.random.randint(10, 100))

    def reset(self, seed=None, low=10):
        return Hint(text=f"Guess a number from {low} to 99.", noise=random.random())

    def step(self, action, timeout_s=None):
        if action.number == CRASHES:
            raise ValueError("the server is broken")
        if action.number == UNPAID:
            return Hint(text="over", noise=0.0, done=True)
        if action.number == CUT:
            return Hint(text="late", noise=0.0, done=True, reward=0.25, metadata={"truncated": True})
        done = action.number == self.number
        text = "right" if done else "higher" if self.number > action.number else "lower"
        return Hint(text=text, noise=random.random(), done=done, reward=float(done), metadata={"guess": action.number})

    @property
    def state(self):
        return State()


app = create_app(Guessing, Guess, Hint)
