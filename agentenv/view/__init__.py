"""The page that shows runs: a read-only server, a single file, and excerpts of one episode as Markdown and SVG.

Neither torch nor transformers is imported. The page itself is in `dist/`, built from `view_src/`.
"""
