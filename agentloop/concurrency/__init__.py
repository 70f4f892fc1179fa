"""Helpers for asyncio, clocks, and fair turns among users."""
