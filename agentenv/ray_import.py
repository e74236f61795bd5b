"""Ray where it is installed, or the words that say how."""

from __future__ import annotations

from typing import Any

from agentenv.errors import MissingDependency


def import_ray(who: str = "--engine ray, --env_actors") -> Any:
    """Ray, for `who`.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingDependency(f"{who}: expected Ray, got {error}. Install it: pip install 'agentenv[ray]'") from error
    return ray
