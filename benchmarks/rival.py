"""A PyTorch program beside a benchmark, in a Python of its own."""

import subprocess
from pathlib import Path


class Torch:
    """Starts `script` of this folder. It answers "go N" with the seconds that N turns of its work took."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        command = [python, str(Path(__file__).with_name(script)), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # it says when it is ready

    def _read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def seconds(self, turns: int) -> float:
        """Of one turn."""
        assert self.process.stdin
        print(f"go {turns}", file=self.process.stdin, flush=True)
        return float(self._read()) / turns

    def end(self) -> None:
        self.process.kill()
