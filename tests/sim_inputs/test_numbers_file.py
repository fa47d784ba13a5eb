"""`--option name=@FILE`: the numbers of a file, or one line that says where it is wrong."""

from __future__ import annotations

import pytest

from shoal.cli.sim_options import parse_options
from shoal.core.errors import InputError

GOOD = {
    "numbers alone": ("1\n2.5\n", "1.0,2.5"),
    "a header is skipped": ("service_gpu_s\n1\n2\n", "1.0,2.0"),
    "blank lines and windows line ends are skipped": ("\r\n 1 \r\n\r\n2e3", "1.0,2000.0"),
    "a byte order mark is no part of the first number": ("\ufeff7\n8\n", "7.0,8.0"),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_numbers_stand_for_the_value(tmp_path, name):
    text, value = GOOD[name]
    path = tmp_path / "numbers"
    path.write_bytes(text.encode())
    assert parse_options([f"history=@{path}"]) == {"history": value}


#: What the file holds, the line that is named, and a part of the message.
BAD = {
    "a word is no number and not a header without numbers": (b"hello\n", 1, "there is no number"),
    "prose is no list of numbers": (b"once upon\na time\n", 2, "'a time' is not a number"),
    "blank lines count": (b"seconds\n\n\n1\n\nx\n", 6, "'x' is not a number"),
    "several numbers in the first line are not a header": (b"1,2,3\n4\n", 1, "one number per line"),
    "several numbers in a line": (b"1\n2 3\n", 2, "'2 3' is not a number"),
    "a negative number": (b"1\n\n-2\n", 3, "not negative, not '-2'"),
    "a negative first number": (b"-2\n1\n", 1, "not negative"),
    "no number first": (b"nan\n1\n", 1, "finite"),
    "an infinite number": (b"1\ninf\n", 2, "finite"),
    "a number too large to be one": (b"h\n1\n1e999\n", 3, "finite"),
    "nothing": (b"\n \n", 1, "is empty"),
    "nothing but a byte order mark": (b"\xef\xbb\xbf\n", 1, "there is no number"),
    "binary data": (b"1\n\0\1", 2, "binary"),
    "another encoding beyond the head": (b"1\n" * 40_000 + b"\xff\n", 40_001, "UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_its_line(tmp_path, name):
    content, line, part = BAD[name]
    path = tmp_path / "numbers"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        parse_options([f"history=@{path}"])
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_too_large_is_not_read(tmp_path):
    path = tmp_path / "numbers"
    with path.open("wb") as file:
        file.write(b"1\n" * 50_000)
        file.truncate(1 << 30)  # sparse: a gigabyte that takes no room
    with pytest.raises(InputError, match=r"numbers:1: is too large .*1,024 MB.*at most 64 MB"):
        parse_options([f"history=@{path}"])


def test_a_missing_file_and_a_directory_are_told(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        parse_options([f"history=@{tmp_path / 'nowhere'}"])
    with pytest.raises(InputError, match="is a directory"):
        parse_options([f"history=@{tmp_path}"])
