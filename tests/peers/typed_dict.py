"""Makes SkyRL 0.3.0 importable on Python 3.11, where pydantic refuses `typing.TypedDict`. Import it before SkyRL."""

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict
