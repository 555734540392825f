"""Exit signals are recorded instead of ending the process."""

import os
import signal

from megatron.training.exit import record_exit_signals


def test_previous_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with record_exit_signals(True) as signals:
        assert signal.getsignal(signal.SIGTERM) != before
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == [signal.SIGUSR1, signal.SIGTERM]  # the first one is the reason
    assert signal.getsignal(signal.SIGTERM) == before
    with record_exit_signals(False):
        assert signal.getsignal(signal.SIGTERM) == before
