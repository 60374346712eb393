"""Graders for the tests of ``agents.in_child``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def add(a: int, b: int) -> int:
    print("what a grader prints is not its answer")
    return a + b


def fails() -> None:
    raise ValueError("no such\nproblem")


def crashes() -> None:
    os.abort()


def never(folder: str) -> None:
    """Leaves its pid and that of a child as one file's name; then stands still for ever."""
    child = subprocess.Popen(["sleep", "1000"])
    (Path(folder) / f"{os.getpid()}-{child.pid}").touch()
    while True:
        time.sleep(1)


def burns(seconds: float) -> list[float]:
    """When it began and ended, after keeping a core busy."""
    began = time.time()
    while time.time() < began + seconds:
        pass
    return [began, time.time()]


def secrets() -> list[str]:
    return [name for name in (*os.environ, *sys.modules) if name.startswith(("INSTAR_", "vllm"))]


def much() -> str:
    return "x" * 500_000


class Held:
    @staticmethod
    def inside(a: int) -> dict:
        return {"a": [a, None]}
