"""Code that runs inside the sandbox: the zygote, its programs' setup, and the probes.

The modules import the standard library, each other and `agentenv.errors`, and nothing else of agentenv: they are sent
to containers as source, and every import makes each fork slower. import-linter enforces this.
"""
