"""A learner of the stable-baselines kind over text environments: collect steps, learn from them, collect again.

python examples/gym_loop.py
expected last line: found 51% of the numbers in round 1, 96% in round 12
"""

import gymnasium
import numpy as np

from agentenv.gym.vector import AgentVectorEnv

PLACES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # where to guess among the remaining numbers
ALL = (1, 15)


class Learner:
    """A policy gradient over where to guess among the remaining numbers; halving them is not built in."""

    def __init__(self, envs: gymnasium.vector.VectorEnv, *, learning_rate=0.05, seed=0):
        self.envs, self.learning_rate, self.rng = envs, learning_rate, np.random.default_rng(seed)
        self.logits = np.zeros(len(PLACES))
        self.left = [ALL] * envs.num_envs
        envs.reset(seed=seed)

    def chances(self):
        """Return the probability of each place."""
        weights = np.exp(self.logits - self.logits.max())
        return weights / weights.sum()

    def collect(self, num_steps):
        """Return the places [steps, envs] of all guesses, their rewards, and the share of solved episodes."""
        places, rewards, found = [], [], []
        for _ in range(num_steps):
            place = self.rng.choice(len(PLACES), size=self.envs.num_envs, p=self.chances())
            guesses = [round(low + PLACES[p] * (high - low)) for p, (low, high) in zip(place, self.left, strict=True)]
            observations, reward, terminated, truncated, infos = self.envs.step([str(guess) for guess in guesses])
            self.left = [read(*seen) for seen in zip(observations, guesses, self.left, strict=True)]
            places.append(place)
            rewards.append(reward)
            if (ended := terminated | truncated).any():
                found.extend(infos["final_info"]["correct"][ended])
        return np.array(places), np.array(rewards), np.mean(found)

    def learn(self, num_rounds, num_steps=24):
        """Collect and learn; return the share of numbers that was found, for each round."""
        history = []
        for _ in range(num_rounds):
            places, rewards, found = self.collect(num_steps)
            advantages = rewards - rewards.mean()
            chosen = places[..., None] == np.arange(len(PLACES))
            self.logits += self.learning_rate * (advantages[..., None] * (chosen - self.chances())).sum((0, 1))
            history.append(found)
        return history


def read(said, guess, left):
    """Return the numbers that remain after the environment's reply to a guess."""
    low, high = left
    if "larger" in said:
        return max(low, guess + 1), high
    if "smaller" in said:
        return low, min(high, guess - 1)
    return ALL  # the next episode: it starts in the step in which the last one ended


def main():
    envs = AgentVectorEnv("guess_number", num_envs=16, env_kwargs={"information_reward": 1.0})
    learner = Learner(envs)
    history = learner.learn(12)
    envs.close()
    for place, chance in zip(PLACES, learner.chances(), strict=True):
        print(f"it guesses at {place:.0%} of what is left {chance:.0%} of the time")
    print(f"found {history[0]:.0%} of the numbers in round 1, {history[-1]:.0%} in round {len(history)}")


if __name__ == "__main__":
    main()
