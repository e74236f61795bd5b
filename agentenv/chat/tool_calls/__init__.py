"""Models' own formats for tool calls: learned (`learn`), described (`syntax`), parsed (`parse`).

Everything public is in `agentenv.tools.calling`.
"""
