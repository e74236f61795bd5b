"""Worker processes that grade what could hang or crash a grader."""
