"""The loopback Hub of tests/hub, for pages that name Hub ids."""

from hub_fixtures import hub

__all__ = ["hub"]
