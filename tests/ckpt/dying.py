"""Kill this process, for real, when a function is called."""

import importlib
import os
import signal


def die_at(module, owner, function, when, nth):
    """SIGKILL before or after call number `nth` of `owner.function`, or of a function of the
    module when `owner` is empty."""
    home = importlib.import_module(module)
    home = getattr(home, owner) if owner else home
    real, calls = getattr(home, function), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(home, function, wrapped)
