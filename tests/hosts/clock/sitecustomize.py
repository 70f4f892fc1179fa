"""The clock of a test host that is apart: hosts of one machine have one clock, and no namespace moves it.

It is on PYTHONPATH of that host's processes alone. Ray's C++ parts and the file systems keep the machine's clock.
"""

import os
import time

_APART_S = float(os.environ["AGENTLOOP_TEST_CLOCK_S"])
_time, _time_ns = time.time, time.time_ns

time.time = lambda: _time() + _APART_S
time.time_ns = lambda: _time_ns() + int(_APART_S * 1e9)
