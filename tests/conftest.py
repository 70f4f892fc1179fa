"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared_cores", deadline=None)  # an example's wall time says nothing of the code
settings.load_profile("shared_cores")
