"""Jobs worked off by several processes; what they find comes back piece by piece."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

Job = TypeVar("Job")
Piece = TypeVar("Piece")


class WorkerDiedError(RuntimeError):
    """A process ended without a word: it was killed, ran out of memory, or could not be started."""


def in_processes(
    work: Callable[[Job], Iterable[Piece]], jobs: Sequence[Job], processes: int, threads: int = 1
) -> Generator[Piece, None, None]:
    """Yield what `work(job)` yields for every job, as it is found.

    A process that has finished a job takes the next one, so the longest should come first. Processes are started
    anew rather than forked (threads of torch do not survive a fork): `work` must be a function of a module, jobs and
    pieces must be picklable, and a script that calls this needs `if __name__ == "__main__"`. They end when the
    iteration does, however that is.

    Args:
        work: called in the processes.
        jobs: its arguments.
        processes: at most so many at once.
        threads: of torch in each process.

    Raises:
        WorkerDiedError: if a process ends without an error of its own.
        Exception: whatever `work` raised, with its traceback as a note.
    """
    context = multiprocessing.get_context("spawn")
    waiting = deque(jobs)
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(processes, len(jobs))):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, work, threads), daemon=True)
            process.start()
            there.close()  # the process holds the only other end: if it dies, reading ends
            workers[here] = process
            here.send(waiting.popleft())
        while workers:
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    raise WorkerDiedError(_last_words(workers[connection])) from None
                if kind == "found":
                    yield value
                elif kind == "failed":
                    raise value
                elif waiting:
                    connection.send(waiting.popleft())
                else:
                    _dismiss(connection, workers.pop(connection))
    finally:
        for connection, worker in workers.items():
            worker.terminate()
            worker.join()
            connection.close()


def _dismiss(connection: Connection, process: BaseProcess) -> None:
    connection.send(None)
    process.join()
    connection.close()


def _last_words(process: BaseProcess) -> str:
    process.join(5)
    return (
        f"a process ended with code {process.exitcode} before its work was done (a negative code is the signal that "
        "killed it, as where memory runs out); what was finished before is kept where there is a folder for it"
    )


def _serve(connection: Connection, work: Callable[[Job], Iterable[Piece]], threads: int) -> None:
    """Work off jobs until None comes, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which ends this process
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        while (job := connection.recv()) is not None:
            try:
                for piece in work(job):
                    connection.send(("found", piece))
                answer: tuple[str, Exception | None] = ("done", None)
            except Exception as error:
                error.add_note(f"raised in another process:\n{traceback.format_exc()}")
                answer = ("failed", error)
            connection.send(answer)
    except (EOFError, BrokenPipeError):
        return  # the parent is gone


def _end_with_the_parent() -> None:
    """A parent that was killed ends nobody: its processes would go on with what no one waits for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
