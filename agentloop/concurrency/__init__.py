"""Helpers for asyncio, clocks, and fair scheduling of users."""
