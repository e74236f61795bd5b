"""`python -m agentenv`: the command."""

from agentenv.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
