"""The borders to other RLHF frameworks: one folder or file for each.

The record formats share `Record`, one training sample, and `columns`, which turns rows into a dict of lists.
"""

from agentenv.interop._records import Record, columns

__all__ = ["Record", "columns"]
