"""Tests of the tools for users' tests."""
