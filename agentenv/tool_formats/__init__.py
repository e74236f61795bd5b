"""How models write calls, in their own formats: found out (`learn`), described (`syntax`), read (`parse`).

Everything public is in `agentenv.tools`.
"""
