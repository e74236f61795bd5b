"""Mathematical answers: found in the text, parsed, and compared in worker processes."""
