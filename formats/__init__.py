"""Bytes <-> arrays: one module a file format. Knows no policy."""
