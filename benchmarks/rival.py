"""A PyTorch program beside a benchmark, in a Python of its own."""

import subprocess
from pathlib import Path


class Torch:
    """Starts `script` of this folder. It answers "go N" with the seconds that N turns of its work took."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        command = [python, str(Path(__file__).with_name(script)), *arguments]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise SystemExit(
                f"--torch: {python} cannot be started ({error}); name a Python that has PyTorch"
            ) from error
        self._read()  # it says when it is ready

    def _read(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} has ended; it needs a Python that has PyTorch")
        return line

    def seconds(self, turns: int) -> float:
        """Of one turn."""
        assert self.process.stdin
        print(f"go {turns}", file=self.process.stdin, flush=True)
        return float(self._read()) / turns

    def end(self) -> None:
        self.process.kill()
