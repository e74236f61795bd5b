"""A loopback OpenAI-compatible endpoint whose sessions record token-exact trajectories, for closed agents.

`session.py` is the recorder, without HTTP; `server.py` serves sessions; `agent.py` runs agent classes against them.
`wire.py` reads and writes chat completions, `responses.py` translates the responses API to them.
"""
