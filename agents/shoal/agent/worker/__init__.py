"""Worker processes, and what starts and watches them."""

from shoal.host.lean_imports import without

with without("rich", "greenlet"):  # as in `shoal.agent.main`
    import structlog  # noqa: F401
