"""The import of Ray."""

from __future__ import annotations

from typing import Any

from agentenv.errors import MissingDependency


def import_ray(who: str = "--engine ray, --env_actors") -> Any:
    """Return the module `ray`, which `who` needs.

    Raises:
        MissingDependency: Ray is not installed.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        message = f"{who}: expected Ray, got {error}. Install it: pip install 'agentenv-rl[ray]'"
        raise MissingDependency(message) from error
    return ray
