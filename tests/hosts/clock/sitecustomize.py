"""A shifted clock for one test host: hosts on one machine share its clock, which namespaces cannot shift.

It is on PYTHONPATH of that host's processes only. Ray's C++ code and the file systems keep the machine's clock.
"""

import os
import time

_APART_S = float(os.environ["AGENTLOOP_TEST_CLOCK_S"])
_time, _time_ns = time.time, time.time_ns

time.time = lambda: _time() + _APART_S
time.time_ns = lambda: _time_ns() + int(_APART_S * 1e9)
