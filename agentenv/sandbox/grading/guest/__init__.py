"""Code that runs inside the sandbox to grade a solution. Only its source is used: nothing outside imports it.

The modules import the standard library and the codec, whose source is sent along. import-linter enforces this.
"""
