"""When training ends before its last step: a signal asks for it, or the budget is used up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from grpo.config import BudgetSettings
from grpo.run.folder import RunFolder
from grpo.run.peers import Peers

FAULT = 1
"""Exit code of a run that a fault ended."""
ECHO_S = 1.0
"""Seconds within which torchrun passes on to its ranks a signal that the whole job received."""


class Stop(Exception):
    """Training ends here, between two phases and in good order."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason, exit_code)
        self.reason, self.exit_code = reason, exit_code


class StopSignals:
    """While training goes on, the first SIGINT or SIGTERM is a wish that it grants between two phases; the second ends
    the process, as any does before and after.

    A thread of its own reads the signals, from a pipe that Python's C handler writes into: the main thread may be
    in a kernel or wait for other ranks, and no handler in Python would run until it comes back.
    """

    def __init__(self, peers: Peers, folder: RunFolder, *, is_main: bool, echoes: bool):
        """`folder` is given up where the process ends. `echoes`: torchrun passes signals on, so that a rank may receive
        twice what was sent once.
        """
        self.received: signal.Signals | None = None
        self._peers, self._folder, self._is_main, self._echoes = peers, folder, is_main, echoes
        self._grants = False
        self._received_at = 0.0

    def __enter__(self) -> StopSignals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._write_end)  # the thread reads the end, and ends

    @contextmanager
    def granted(self) -> Iterator[None]:
        """While training goes on, and looks at `received`."""
        self._grants = True
        try:
            yield
        finally:
            self._grants = False

    def _watch(self) -> None:
        while numbers := os.read(self._read_end, 64):
            for number in numbers:
                if number in self._handlers:
                    self._receive(signal.Signals(number))
        os.close(self._read_end)

    def _receive(self, number: signal.Signals) -> None:
        if number == signal.SIGTERM and self._peers.any_gone():
            # A rank has failed, and torchrun takes down the others.
            killed = self._peers.tell_killed(self._folder.path)
            self._end_process(number, "a rank was killed, or crashed" if killed else "a rank failed")
        elif not self._grants:
            self._end_process(number, f"stopped at once by {number.name}")
        elif self.received is None:
            self.received, self._received_at = number, time.monotonic()
            patience = "; torchrun kills what is not done within its --shutdown-timeout" if self._echoes else ""
            self._say(
                f"{number.name}: finishing the phase that runs, then saving the model and stopping (again: stop at "
                f"once, and keep only what run.save_every saved{patience})"
            )
        elif not (self._echoes and number == self.received and time.monotonic() - self._received_at < ECHO_S):
            self._say(f"{number.name} again: stopped at once; what earlier steps wrote is in {self._folder.path}")
            self._end_process(number, f"stopped at once by a second {number.name}")

    def _end_process(self, number: signal.Signals, reason: str) -> NoReturn:
        """Waits for nothing that could wait for the main thread, which may not come back."""
        self._peers.leave()
        self._folder.end(reason)
        self._folder.release()
        os._exit(128 + number)

    def _say(self, text: str) -> None:
        if self._is_main:
            os.write(2, f"\n{text}\n".encode())


def how_to_go_on(stop: Stop, folder: RunFolder, num_done: int, total_steps: int) -> str:
    """For the person at the terminal: what ended the run, what is kept of it, and what trains on from that."""
    reason = "stopped by this fault" if stop.exit_code == FAULT else stop.reason
    steps = f"{reason}; {num_done} of {total_steps} steps are done"
    weights = folder.weights()[-1:] if num_done else []  # before, those of an earlier run may lie there
    if not weights:
        return f"{steps}, {'no model was saved' if num_done else 'nothing to save'}"
    if weights[0].step == num_done:
        kept = f"the model as it is then: {weights[0].path}"
    else:
        kept = f"the newest model that is saved is of step {weights[0].step}: {weights[0].path}"
    command = folder.command_to_go_on()
    return f"{steps}, {kept}" + (f"\nto go on from it: {command}" if command else "")


def used_up(budget: BudgetSettings, metrics: Mapping[str, float], hours: float) -> str | None:
    """Which part of the budget is used up, in words; None where there is some left of everything.

    `metrics` of the last step have `total/<role>/prompt_tokens` and `.../completion_tokens` of all ranks.
    """
    for role, limit in (("user", budget.user_tokens), ("judge", budget.judge_tokens)):
        if limit is not None:
            tokens = metrics[f"total/{role}/prompt_tokens"] + metrics[f"total/{role}/completion_tokens"]
            if tokens >= limit:
                return f"run.budget.{role}_tokens: {limit} is used up ({tokens:.0f} tokens)"
    if budget.hours is not None and hours >= budget.hours:
        return f"run.budget.hours: {budget.hours:g} is used up ({hours:.2f} hours)"
    return None
