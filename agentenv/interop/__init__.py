"""The borders to other RLHF frameworks: one folder or file for each.

The record formats share `Record`, one training sample. `records` makes those of an episode, and `columns` turns rows
into a dict of lists.
"""

from agentenv.interop._records import Record, columns, records

__all__ = ["Record", "columns", "records"]
