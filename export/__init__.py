"""Artifact -> the files that other engines run. Contains no algorithm."""
