"""The loopback Hub and its clock for the tests of this folder."""

from hub_fixtures import hub, waits

__all__ = ["hub", "waits"]
