"""Names made from commands: of a job, and of the model that similar jobs share."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re

_SHELL = r"(ba|da|z)?sh"
_WRAPPERS = rf"{_SHELL}|env|exec|nice|nohup|time|python[0-9.]*|uv|run|torchrun"
#: Commands that prepare a script, and words that precede a command.
_PREAMBLE = ("cd", "set", "export", "source", ".", "ulimit", "trap", "umask", "for", "while", "until", "case")
_LEADING = ("do", "then", "if", "else", "{", "(", "!", "time")


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def short_name(command: list[str]) -> str:
    """`train` from `python -u /x/train.py --lr 1`, and from `sh -c 'cd /x && python train.py'`."""
    first = os.path.basename(command[0]) if command else ""
    if re.fullmatch(_SHELL, first):
        return program_name(_inline(command) or command)
    if re.fullmatch(r"python[0-9.]*", first) and "-c" in command[1:3]:
        return "python"
    return program_name(command)


def program_name(command: list[str]) -> str:
    """`train` from `python -u /x/train.py --lr 1`."""
    words = [os.path.basename(w) for w in command if not w.startswith("-") and not re.match(r"\w+=", w)]
    while len(words) > 1 and re.fullmatch(_WRAPPERS, words[0]):
        words = words[1:]
    name = re.sub(r"[^A-Za-z0-9]+", "-", words[0].removesuffix(".py") if words else "job").strip("-")
    return name[:40].strip("-") or "job"


def model_word(command: list[str]) -> str:
    """The model word of a job that gives none: jobs with the same command share measurements."""
    return f"{program_name(command)}:{hash_of(json.dumps(command))[:16]}"


def _inline(command: list[str]) -> list[str] | None:
    """The first command of a shell's `-c` script that is not a preparation."""
    flag = next((i for i, word in enumerate(command) if re.fullmatch(r"-[a-z]*c", word)), None)
    if flag is None or flag + 1 >= len(command):
        return None
    for part in re.split(r"[;&|\n]+", command[flag + 1]):
        words = list(itertools.dropwhile(lambda word: word in _LEADING, part.split()))
        if words and words[0] not in _PREAMBLE:
            return words
    return None


def printable(text: str) -> str:
    """The text with what UTF-8 cannot encode replaced."""
    return text.encode("utf-8", "replace").decode()
