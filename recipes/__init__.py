"""Shipped recipes (TOML)."""
