"""What all tests of the workspace share."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, and children inherit it: no test of Ctrl-C
# could pass there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
