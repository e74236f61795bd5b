"""`python -m agentenv.cli`: the command."""

from agentenv.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
