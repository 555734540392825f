"""Exit signals are remembered, not died from."""

import os
import signal

from megatron.training.exit import ExitSignals


def test_handlers_return_at_the_end():
    before = signal.getsignal(signal.SIGTERM)
    with ExitSignals().installed(True) as signals:
        assert signal.getsignal(signal.SIGTERM) != before
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is signal.SIGUSR1  # the first one is the reason
    assert signal.getsignal(signal.SIGTERM) == before
    with ExitSignals().installed(False):
        assert signal.getsignal(signal.SIGTERM) == before
