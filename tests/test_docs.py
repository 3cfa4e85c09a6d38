"""The documents: what they link to is there, and the command line takes the commands they show."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from atoll import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CHECKED = ("run", "compare", "sweep", "partition", "reproduce", "serve", "join", "certs", "export-flower", "party")


def shown() -> list[str]:
    """All commands in blocks of code, without comments and what stands for something else."""
    found = []
    for page in PAGES:
        for line in page.read_text().replace("\\\n", " ").splitlines():
            match = re.match(r" {4,}(?:\w+=\S+ |srun )*(atoll .*)", line)
            if match:
                words = shlex.split(match[1], comments=True)
                if words[1] in CHECKED and "..." not in words and not words[2].startswith("runs/"):
                    found.append(shlex.join(words[1:]))
    return list(dict.fromkeys(found))


class _Understood(Exception):
    pass


@pytest.mark.parametrize("command", shown())
def test_a_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = tyro.cli

    def read_only(*args: Any, **kwargs: Any) -> None:
        read(*args, **kwargs)
        raise _Understood

    monkeypatch.setattr(tyro, "cli", read_only)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(_Understood):
        cli.main(shlex.split(command))


def test_there_are_commands_to_check() -> None:
    assert {command.split()[0] for command in shown()} >= {"run", "reproduce", "sweep", "serve", "join", "party"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing
